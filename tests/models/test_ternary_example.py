"""The trained ternary model in examples/ternary: it writes text, and its perplexity is what its
training says."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import effinfer
from effinfer import _core
from tests.reference.decoder import Decoder

FOLDER = Path(__file__).parents[2] / "examples" / "ternary"
MODEL, TEXT = FOLDER / "model.gguf", FOLDER / "sample.txt"
CONTEXT = 256
PERPLEXITY = 19.185  # of TEXT, by train.py's model in torch


@pytest.fixture(scope="module")
def llm():
    return effinfer.LLM(MODEL, precision="f32")


def perplexity(ids, log_likelihoods):
    windows = [ids[i : i + CONTEXT] for i in range(0, len(ids), CONTEXT)]
    scores = np.concatenate([log_likelihoods(window) for window in windows])
    return float(np.exp(-scores.mean()))


def test_it_is_small_and_ternary():
    assert MODEL.stat().st_size < 1e6
    types = {t.name: t.type_name for t in _core.GgufFile(MODEL).tensors() if len(t.shape) == 2}
    assert types.pop("token_embd.weight") == "q8_0"
    assert set(types.values()) == {"i2_s"} and len(types) == 14


def test_perplexity_is_that_of_the_training(llm, tmp_path):
    ids = llm.tokenize(TEXT.read_text(encoding="utf-8"))
    # The gguf package does not know i2_s.
    effinfer.quantize(MODEL, tmp_path / "model.gguf", "tq2_0", head="q8_0")
    reference = Decoder.from_gguf(tmp_path / "model.gguf")

    def by_reference(window):
        scores = torch.log_softmax(reference.logits(window[:-1]).double(), -1)
        return scores[range(len(window) - 1), window[1:]].numpy()

    expected = perplexity(ids, by_reference)
    assert perplexity(ids, llm.log_likelihoods) == pytest.approx(expected, rel=2e-3)
    # The 8-bit embedding is the only difference between the training's model and the file's.
    assert expected == pytest.approx(PERPLEXITY, rel=5e-3)
    fast = effinfer.LLM(MODEL)
    assert perplexity(ids, fast.log_likelihoods) == pytest.approx(expected, rel=1e-2)


def test_packings_give_the_same_bits(llm):
    ids = llm.tokenize(TEXT.read_text(encoding="utf-8"))[:64]
    logits = [
        effinfer.LLM(MODEL, precision="f32", ternary_packing=packing).logits(ids)
        for packing in ("t2", "t1_6")
    ]
    np.testing.assert_array_equal(*logits)


def test_it_writes_words(llm):
    params = effinfer.SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    known = set(re.findall(r"[a-z]{2,}", TEXT.read_text(encoding="utf-8").lower()))
    for prompt in ("Return the", "This function is", "The value of the"):
        text = llm.generate(prompt, params)[0].text
        words = re.findall(r"[a-z]{2,}", text.lower())
        assert len(words) > 10, text
        assert sum(word in known for word in words) > len(words) / 2, text

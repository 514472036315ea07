"""Sparse prefills on a real model, and how they are chosen."""

import pydoc_data.topics
from collections.abc import Callable

import numpy as np
import pytest

import effinfer
from effinfer import SamplingParams
from effinfer.techniques import (
    PREFILLS,
    HyperAttention,
    MInference,
    SampleAttention,
    SparsePrefill,
    XAttention,
    as_prefill,
)
from tests.model_files import gemma3_path, smollm2_path

LENGTH = 1200
ANSWER = "48213"
FACT = f" The special magic number of the city of Lisbon is {ANSWER}. "
QUESTION = "\n\nThe special magic number of the city of Lisbon is"
METHODS = {
    "vertical_slash": MInference(min_tokens=0, vertical_size=100, slash_size=40),
    "block_sparse": MInference(min_tokens=0, pattern="block_sparse", num_blocks=6),
    "a_shape": MInference(
        min_tokens=0, pattern="a_shape", a_shape_local_tokens=300, a_shape_sink_tokens=64
    ),
    "sample_attention": SampleAttention(min_tokens=0, mass=0.9, local_tokens=200),
    "hyper_attention": HyperAttention(min_tokens=0, keys=320, samples=128, local_tokens=128),
    "xattention": XAttention(min_tokens=0, threshold=0.9),
}


def load(
    prefill: str | SparsePrefill, model: Callable = smollm2_path, max_batch_tokens: int = 600
) -> effinfer.LLM:
    return effinfer.LLM(
        model(),
        prefill=prefill,
        max_seq_len=LENGTH + 64,
        max_batch_tokens=max_batch_tokens,
        prefix_cache=False,
    )


def text(llm: effinfer.LLM) -> list[int]:
    topics = pydoc_data.topics.topics
    return llm.tokenize("\n".join(topics[name] for name in sorted(topics))[: 6 * LENGTH])


@pytest.fixture(scope="module")
def dense() -> effinfer.LLM:
    return load("dense")


def perplexity(llm: effinfer.LLM) -> float:
    return float(np.exp(-llm.log_likelihoods(text(llm)[:LENGTH]).mean()))


def answer(llm: effinfer.LLM) -> str:
    fact, question = (llm.tokenize(part, add_special=False) for part in (FACT, QUESTION))
    hay = text(llm)
    cut = LENGTH // 3
    prompt = [*hay[:cut], *fact, *hay[cut : LENGTH - len(fact) - len(question)], *question]
    params = SamplingParams(max_tokens=10, temperature=0.0)
    return llm.generate([prompt], params)[0].text


@pytest.fixture(scope="module")
def exact(dense) -> float:
    assert ANSWER in answer(dense)
    return perplexity(dense)


@pytest.mark.parametrize("name", METHODS)
def test_text_stays_as_likely_and_a_fact_is_found(exact, name):
    llm = load(METHODS[name])
    sparse = perplexity(llm)
    assert sparse != exact
    assert sparse < 1.1 * exact
    assert ANSWER in answer(llm)


def test_layers_with_windows_and_without():
    llm = load(METHODS["xattention"], gemma3_path)
    assert perplexity(llm) < 1.1 * perplexity(load("dense", gemma3_path))
    # Every sixth layer of Gemma 3 is global; each phase has its own calls.
    assert llm.explain().count("= block_index") == 2 * 3


# A model that is trained with a fixed pattern has it from the first key on.
@pytest.mark.parametrize("name", sorted({*PREFILLS} - {"s2_attention"}))
def test_short_prompts_are_dense(dense, name):
    tokens = text(dense)[:700]
    np.testing.assert_array_equal(load(name).logits(tokens), dense.logits(tokens))


def test_steps_in_which_choosing_does_not_pay_are_dense(dense):
    tokens = text(dense)[:700]
    exact = dense.logits(tokens)
    # 64 rows of 128 are asked about all keys, twice.
    for min_tokens, chosen in ((1, False), (0, True)):
        llm = load(MInference(min_tokens=min_tokens), max_batch_tokens=128)
        assert np.array_equal(llm.logits(tokens), exact) != chosen


def test_explain_tells_what_is_chosen_and_when():
    explained = load("minference").explain()
    assert "last 64 rows columns=256 slashes=256" in explained
    assert "all keys: fewer than 64 rows or 2048 keys, or choosing, at " in explained
    assert "costs over 0.33 of what it can save" in explained


def test_names():
    assert as_prefill("dense") is None
    assert as_prefill("xattention") == XAttention()
    own = MInference(vertical_size=7)
    assert as_prefill(own) is own
    with pytest.raises(effinfer.InvalidArgumentError, match=r"prefill: expected dense, hyper"):
        effinfer.LLM(smollm2_path(), prefill="dens")


@pytest.mark.parametrize("head", [(30, 0), (0, 3), (-1, 0), ("0", 0)])
def test_heads_that_the_model_lacks(head):
    with pytest.raises(effinfer.InvalidArgumentError, match=r"\[MInference\] patterns: expected"):
        load(MInference(patterns={(29, 2): "a_shape", head: "a_shape"}))


def test_a_head_with_a_window():
    with pytest.raises(effinfer.InvalidArgumentError, match=r"without a window, got \(0, 0\)"):
        load(MInference(patterns={(0, 0): "a_shape"}), gemma3_path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MInference(vertical_size=-1), r"\[MInference\] vertical_size"),
        (lambda: MInference(pattern="slash"), r"\[MInference\] pattern"),
        (lambda: MInference(patterns={(0, 0): ""}), r"\[MInference\] pattern"),
        (lambda: SampleAttention(sample_ratio=0), r"\[SampleAttention\] sample_ratio"),
        (lambda: SampleAttention(mass=2), r"\[SampleAttention\] mass"),
        (lambda: XAttention(stride=5), r"\[XAttention\] stride"),
        (lambda: XAttention(threshold=0), r"\[XAttention\] threshold"),
    ],
)
def test_wrong_parameters(make, message):
    with pytest.raises(effinfer.InvalidArgumentError, match=message):
        make()

"""Techniques on a GPU: those that it has, beside the CPU's, and those that it refuses, by name. In
a process that preloads the library with the emulator for a GPU (EFFINFER_EMULATED, which
`make test` sets)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import effinfer
from effinfer.techniques import H2O, AttentionPredictor, Quest, StreamingLLM
from tests.reference import tiny
from tests.techniques.predictor_file import network_of_the_contract

EMULATED = os.environ.get("EFFINFER_EMULATED", "")
TOKENS = [tiny.BOS, *np.random.default_rng(3).integers(0, 256, 329).tolist()]
MODEL = tiny.FAMILIES["llama"] | {"max_position_embeddings": 512}
QUEST = Quest(budget=4 * 64, min_tokens=0, skip_layers=1)
# Pages go whole, and some tokens with them.
STREAMING = StreamingLLM(sinks=4, recent=150, stride=40, chunk_tokens=64)
ENCODING = ["kivi", "gear", "cskv", "xkv", "comm_vq"]
WEIGHING = ["chelsea", "subgen", "zero_tuning"]
FORGETFUL = H2O(decay=0.9)
PREDICTED = AttentionPredictor(budget=256, min_tokens=0, path=network_of_the_contract())
REFUSED = [*ENCODING, *WEIGHING, FORGETFUL, PREDICTED]
SHARED = Quest(budget=4 * 64, min_tokens=0, skip_layers=0, reuse_layers=2)
TECHNIQUES = {"quest": QUEST, "quest, layers": SHARED, "streaming_llm": STREAMING}
GREEDY = effinfer.SamplingParams(max_tokens=6, temperature=0.0, logprobs=0, ignore_eos=True)
CODE = """
import json, sys
import effinfer
from tests.techniques.test_on_gpu import REFUSED, TECHNIQUES, answer

path = sys.argv[1]
found = {"answers": {}, "explain": {}, "refused": {}}
for device in ("cuda", "cpu+cuda"):
    options = {"device": device, "precision": "f32"}
    if device == "cpu+cuda":
        options["gpu_layers"] = 1
    for name, technique in TECHNIQUES.items():
        with effinfer.LLM(path, techniques=[technique], **options) as llm:
            found["answers"].setdefault(name, []).append(answer(llm))
            found["explain"][name] = llm.explain()
for name in REFUSED:
    try:
        with effinfer.LLM(path, device="cuda", techniques=[name]) as llm:
            answer(llm)
    except effinfer.UnsupportedError as error:
        found["refused"][getattr(name, "name", name)] = str(error)
print(json.dumps(found))
"""

pytestmark = pytest.mark.skipif(not EMULATED, reason="needs EFFINFER_EMULATED: see `make test`")


def answer(llm: effinfer.LLM) -> tuple[list[int], list[float]]:
    output = llm.generate([TOKENS], GREEDY)[0]
    assert output.logprobs is not None
    return output.token_ids, [each.logprob for each in output.logprobs]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(MODEL, tmp_path_factory.mktemp("gpu") / "model.gguf")


@pytest.fixture(scope="module")
def found(path: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(path)],
        env=os.environ | {"LD_PRELOAD": EMULATED},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", list(TECHNIQUES))
def test_keys_are_those_of_the_cpu(path: Path, found: dict[str, Any], name: str):
    with effinfer.LLM(path, techniques=[TECHNIQUES[name]], precision="f32") as llm:
        tokens, expected = answer(llm)
    with effinfer.LLM(path, precision="f32") as llm:
        dense = answer(llm)[1]
    assert len(found["answers"][name]) == 2
    for got, logprobs in found["answers"][name]:
        assert got == tokens
        np.testing.assert_allclose(logprobs, expected, atol=1e-4)
        assert np.abs(np.subtract(logprobs, dense)).max() > 1e-3


def test_a_gpu_chooses_pages_itself(found: dict[str, Any]):
    assert "page_index.cuda" in found["explain"]["quest"]


def test_what_a_gpu_has_not_is_refused_by_name(found: dict[str, Any]):
    refused = found["refused"]
    assert list(refused) == [*ENCODING, *WEIGHING, "h2o", "attention_predictor"]
    assert "history_index" in refused["attention_predictor"]
    for name in ENCODING:
        assert "coding" in refused[name]
    for name in WEIGHING:
        assert "keys have no weights" in refused[name]
    assert "sums that decay" in refused["h2o"]

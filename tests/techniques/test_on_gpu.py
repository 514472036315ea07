"""Techniques on a GPU, and on one beside the CPU: the CPU's texts. In a process that preloads the
library with the emulator for a GPU (EFFINFER_EMULATED, which `make test` sets)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import effinfer
from effinfer.techniques import (
    CSKV,
    GEAR,
    KIVI,
    XKV,
    ActQKV,
    AttentionPredictor,
    Chelsea,
    CommVQ,
    DoubleSparsity,
    HyperAttention,
    InfLLMV2,
    KVCompose,
    MagicPIG,
    MInference,
    Quest,
    Qwen1M,
    S2Attention,
    SqueezedAttention,
    StreamingLLM,
    SubGen,
    Technique,
    TokenButler,
    TokenSelect,
    XAttention,
    ZeroTuning,
)
from tests.reference import tiny
from tests.techniques.contract_cases import random_basis, random_codebooks
from tests.techniques.predictor_file import network_of_the_contract, predictor_of_the_contract

EMULATED = os.environ.get("EFFINFER_EMULATED", "")
TOKENS = [tiny.BOS, *np.random.default_rng(3).integers(0, 256, 329).tolist()]
MODEL = tiny.FAMILIES["llama"] | {"max_position_embeddings": 512}
QUEST = Quest(budget=4 * 64, min_tokens=0, skip_layers=1)
# Pages go whole, and some tokens with them.
STREAMING = StreamingLLM(sinks=4, recent=150, stride=40, chunk_tokens=64)
FEW: dict[str, Any] = {"budget": 256, "min_tokens": 0, "skip_layers": 0}
FIRST: dict[str, Any] = {"min_tokens": 0, "local_tokens": 64, "chunk_tokens": 128}
MERGED: dict[str, Any] = {"budget": 150, "recent": 20, "stride": 30, "chunk_tokens": 128}
LAYERED = KVCompose(budget=170, window=20, chunk_tokens=128, layer_budgets=True)
TECHNIQUES: dict[str, Technique] = {
    "quest": QUEST,
    "quest, layers": Quest(**FEW, reuse_layers=2),
    "quest, units": Quest(**FEW, unit=16),
    "streaming_llm": STREAMING,
    "act_qkv": ActQKV(
        budget=320, min_tokens=0, skip_layers=0, spread=(3.0, 1.0, 2.0), chunk_tokens=128
    ),
    "attention_predictor": AttentionPredictor(**FEW, every=4, path=network_of_the_contract()),
    "chelsea": Chelsea(**MERGED, sinks=2, chunk=16),
    "kivi": KIVI(residual=64),
    "kivi, 2 bits": KIVI(bits=2, residual=0),
    "gear": GEAR(bits=2, rank=2, outliers=4, residual=16),
    "comm_vq": CommVQ(residual=100, codebooks=random_codebooks()),
    "cskv": CSKV(features=16, residual=50, basis=random_basis(16, 32)),
    "xkv": XKV(layers=2, features=32, residual=50, basis=random_basis(32, 32)),
    "double_sparsity": DoubleSparsity(**FEW, channels=2, labels=(0, 1, 6, 7) * 3),
    "hyper_attention": HyperAttention(**FIRST, keys=64, samples=64, bits=4),
    "infllm_v2": InfLLMV2(**FEW, local=64),
    "kv_compose, layers": LAYERED,
    "magic_pig": MagicPIG(
        bits=3, tables=8, min_tokens=0, skip_layers=0, means=tuple(range(-48, 48))
    ),
    "minference": MInference(
        min_tokens=0, vertical_size=30, slash_size=20, local_tokens=9, chunk_tokens=128
    ),
    # The text's tokens behind a chunk, of which the last are behind the context.
    "qwen_1m": Qwen1M(chunk=256, context=300),
    "s2_attention": S2Attention(**FIRST, stride=4),
    "squeezed_attention": SqueezedAttention(**FEW, context=200),
    "subgen": SubGen(**MERGED),
    "token_butler": TokenButler(**FEW, path=predictor_of_the_contract()),
    "token_select": TokenSelect(**FEW),
    "token_select, kept": TokenSelect(**FEW, reuse=0.05),
    "xattention": XAttention(min_tokens=0, threshold=0.5, stride=4, chunk_tokens=128),
    "zero_tuning": ZeroTuning(percent=20),
}
# Pages that are encoded: the CPU multiplies their codes with integers of 16 bits.
ENCODED = {"kivi", "kivi, 2 bits", "gear", "comm_vq", "cskv", "xkv"}
# Later layers read the keys of earlier ones, so that no line divides them; or pages are encoded
# much like others.
UNDIVIDED = {"token_butler", "kivi, 2 bits", "gear", "cskv"}
# Scores of pages are products of keys of 16 bits, with which attention rounds, too.
ROUNDED = {"act_qkv"}
# The kernel of each technique's index.
KERNELS = {
    "quest": "page_index",
    "act_qkv": "block_index",
    "attention_predictor": "history_index",
    "double_sparsity": "page_index",
    "hyper_attention": "bucket_index",
    "infllm_v2": "page_index",
    "magic_pig": "hash_index",
    "minference": "column_index",
    "s2_attention": "strided_index",
    "token_select": "page_index",
    "xattention": "block_index",
}
GREEDY = effinfer.SamplingParams(max_tokens=6, temperature=0.0, logprobs=0, ignore_eos=True)
CODE = """
import json, sys
import effinfer
from tests.techniques.test_on_gpu import (
    LAYERED, TECHNIQUES, UNDIVIDED, answer, options_of
)

path, windowed = sys.argv[1:]
found = {"answers": {}, "explain": {}, "windowed": []}
for places in ({"device": "cuda"}, {"device": "cpu+cuda", "gpu_layers": 1}):
    with effinfer.LLM(windowed, techniques=[LAYERED], **places, **options_of("")) as llm:
        found["windowed"].append(answer(llm))
for device in ("cuda", "cpu+cuda"):
    for name, technique in TECHNIQUES.items():
        options = options_of(name) | {"device": device}
        if device == "cpu+cuda":
            if name in UNDIVIDED:
                continue
            options["gpu_layers"] = 1
        with effinfer.LLM(path, techniques=[technique], **options) as llm:
            found["answers"].setdefault(name, []).append(answer(llm))
            found["explain"][name] = llm.explain()
print(json.dumps(found))
"""

pytestmark = pytest.mark.skipif(not EMULATED, reason="needs EFFINFER_EMULATED: see `make test`")


def answer(llm: effinfer.LLM) -> tuple[list[int], list[float]]:
    output = llm.generate([TOKENS], GREEDY)[0]
    assert output.logprobs is not None
    return output.token_ids, [each.logprob for each in output.logprobs]


def options_of(name: str) -> dict[str, Any]:
    return {"precision": "f32", "kv_dtype": "bf16" if name in ROUNDED else "f32"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(MODEL, tmp_path_factory.mktemp("gpu") / "model.gguf")


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of its layers has no window."""
    model = tiny.FAMILIES["gemma3"] | {"max_position_embeddings": 512}
    return tiny.write_gguf(model, tmp_path_factory.mktemp("gpu") / "windowed.gguf")


@pytest.fixture(scope="module")
def found(path: Path, windowed: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(path), str(windowed)],
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
    with effinfer.LLM(path, techniques=[TECHNIQUES[name]], **options_of(name)) as llm:
        tokens, expected = answer(llm)
    with effinfer.LLM(path, **options_of(name)) as llm:
        dense = answer(llm)[1]
    assert len(found["answers"][name]) == (1 if name in UNDIVIDED else 2)
    for got, logprobs in found["answers"][name]:
        assert got == tokens
        atol = 3e-2 if name in ROUNDED else 1e-3 if name in ENCODED else 1e-4
        np.testing.assert_allclose(logprobs, expected, atol=atol)
        assert np.abs(np.subtract(logprobs, dense)).max() > 1e-3


def test_layers_with_a_window_are_beside_those_with_tables(windowed: Path, found: dict[str, Any]):
    with effinfer.LLM(windowed, techniques=[LAYERED], **options_of("")) as llm:
        tokens, logprobs = answer(llm)
    for got, others in found["windowed"]:
        assert got == tokens
        np.testing.assert_allclose(others, logprobs, rtol=1e-2, atol=1e-9)


def test_a_gpu_chooses_keys_itself(found: dict[str, Any]):
    for name, kernel in KERNELS.items():
        assert f"{kernel}.cuda" in found["explain"][name], name

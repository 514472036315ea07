"""Sparse decodings on a real model: what is asked for is found, drafts change no text, and what the
cache knows of keys stays right."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import effinfer
from effinfer import SamplingParams, Speculation
from effinfer.techniques import (
    ActQKV,
    DoubleSparsity,
    InfLLMV2,
    Quest,
    SparseDecode,
    SuffixDecoding,
    TokenButler,
    TokenRecycling,
    TokenSelect,
)
from effinfer.techniques.key_channels import queries_and_keys
from tests.model_files import smollm2_path
from tests.techniques.test_prefill import ANSWER, FACT, QUESTION, text

LENGTH = 1200
FEW = {"budget": 320, "min_tokens": 0}  # a fourth of the keys
LAYERS, KV_HEADS, HEAD_DIM = 30, 3, 64


def load(*techniques: SparseDecode, **options: object) -> effinfer.LLM:
    settings = {"max_seq_len": LENGTH + 64, "max_batch_tokens": 600, "threads": 1}
    return effinfer.LLM(smollm2_path(), techniques=list(techniques), **{**settings, **options})


@pytest.fixture(scope="module")
def plain() -> effinfer.LLM:
    return load()


@pytest.fixture(scope="module")
def calibrated(plain) -> DoubleSparsity:
    few = DoubleSparsity(**FEW, channels=16)
    return few.calibrate(plain, plain.detokenize(text(plain)[:500]))


@pytest.fixture(scope="module")
def spread(plain) -> ActQKV:
    return ActQKV(budget=576, min_tokens=0).calibrate(plain, plain.detokenize(text(plain)[:500]))


PREDICTOR = Path(__file__).parents[2] / "examples" / "selectors" / "token_butler.gguf"
METHODS = ("quest", "token_select", "double_sparsity", "infllm_v2", "act_qkv", "token_butler")


@pytest.fixture(scope="module", params=METHODS)
def method(request, calibrated, spread) -> SparseDecode:
    methods = {
        "quest": Quest(**FEW, unit=16),
        "token_select": TokenSelect(**FEW),
        "double_sparsity": calibrated,
        "infllm_v2": InfLLMV2(budget=576, local=128, min_tokens=0),
        "act_qkv": spread,
        "token_butler": TokenButler(**FEW, path=str(PREDICTOR)),
    }
    return methods[request.param]


@pytest.fixture(scope="module")
def llm(method) -> effinfer.LLM:
    return load(method)


def asking(llm: effinfer.LLM, depth: float) -> list[int]:
    fact, question = (llm.tokenize(part, add_special=False) for part in (FACT, QUESTION))
    hay = text(llm)
    cut = int(LENGTH * depth)
    return [*hay[:cut], *fact, *hay[cut : LENGTH - len(fact) - len(question)], *question]


def test_a_fact_is_found(llm):
    greedy = SamplingParams(max_tokens=10, temperature=0.0)
    assert ANSWER in llm.generate([asking(llm, 0.5)], greedy)[0].text
    llm.engine.kv_cache.check_integrity()


def likelihood(llm: effinfer.LLM) -> float:
    """Of the last 100 tokens, one by one."""
    tokens = text(llm)[:LENGTH]
    return float(llm.log_likelihoods(tokens, phase="decode")[-100:].mean())


@pytest.fixture(scope="module")
def dense(plain) -> float:
    return likelihood(plain)


def test_generated_text_stays_as_likely(llm, dense):
    sparse = likelihood(llm)
    assert sparse != dense
    assert sparse > dense - 0.1


def share_of_attention(q: np.ndarray, k: np.ndarray, channels: np.ndarray) -> float:
    """What the query heads q [rows, group, dim] of a KV head give of their attention to those 32 of
    the keys k [n, dim] for which their products of some channels are highest."""

    def attention(x: np.ndarray, keys: np.ndarray) -> np.ndarray:
        logits = np.einsum("rgd,kd->rgk", x, keys) * HEAD_DIM**-0.5
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    scores = attention(q[..., channels], k[:, channels]).max(1)
    chosen = np.argsort(-scores, axis=-1)[:, :32]
    return np.take_along_axis(attention(q, k).mean(1), chosen, -1).sum(-1).mean()


def test_labels_hold_more_attention_than_channels_at_random(calibrated, plain):
    """Of 4 channels, on another text than they were found on: the last 64 rows choose of 256."""
    few = replace(calibrated, channels=4).calibrate(plain, plain.detokenize(text(plain)[:500]))
    labels = np.array(few.labels).reshape(LAYERS, KV_HEADS, 4)
    rng = np.random.default_rng(3)
    of_labels, at_random = [], []
    for own, (q, k) in zip(
        labels, queries_and_keys(plain.files, text(plain)[700:1212]), strict=True
    ):
        for head in range(KV_HEADS):
            rows, keys = q[-64:, head], k[64:320, head]
            of_labels.append(share_of_attention(rows, keys, own[head]))
            other = rng.choice(HEAD_DIM, 4, replace=False)
            at_random.append(share_of_attention(rows, keys, other))
    assert np.mean(of_labels) > 1.5 * np.mean(at_random)


def test_labels_are_of_the_model(calibrated, plain):
    error = effinfer.InvalidArgumentError
    assert len(calibrated.labels) == LAYERS * KV_HEADS * 16
    with pytest.raises(error, match=r"labels: expected 16 of each of 90 KV heads"):
        load(replace(calibrated, labels=calibrated.labels[1:]))
    with pytest.raises(error, match=r"text: expected at least 256 tokens, got"):
        calibrated.calibrate(plain, "Two words")
    with pytest.raises(error, match=r"channels: expected an even number of at most 64"):
        replace(calibrated, channels=66).calibrate(plain, "one two three " * 200)


def test_layers_whose_attention_is_spread_choose_more_keys(spread, plain):
    """As many as ever together, by the effective number of windows, computed naively."""
    tokens = plain.tokenize(plain.detokenize(text(plain)[:500]))
    expected = []
    for q, k in queries_and_keys(plain.files, tokens):
        means = [k[start : start + 32].mean(0) for start in range(0, len(k) - 64 - 31, 16)]
        logits = np.einsum("rhgd,whd->rhgw", q[-64:], np.array(means, np.float64)) * HEAD_DIM**-0.5
        weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        expected.append(np.exp(-(weights * np.log(weights)).sum(-1).mean()))
    assert np.allclose(spread.spread, expected, rtol=1e-4)  # keys are float32
    assert max(expected) > 1.2 * min(expected)

    nodes = spread.graph(plain.files.graph).nodes
    indices = [node["attributes"] for node in nodes if node["op"] == "page_index"]
    keys = {facts["layer"]: facts["keys"] for facts in indices}
    assert sorted(keys) == list(range(2, LAYERS))
    assert sum(keys.values()) == (LAYERS - 2) * (576 - 192)
    shares = np.array(expected[2:]) / sum(expected[2:]) * (LAYERS - 2) * (576 - 192)
    assert np.abs(np.array([keys[layer] for layer in range(2, LAYERS)]) - shares).max() <= 64


def test_spread_is_of_the_model(spread, plain):
    error = effinfer.InvalidArgumentError
    with pytest.raises(error, match=r"spread: expected a number above 0 for each of 30 layers"):
        load(replace(spread, spread=spread.spread[1:]))
    with pytest.raises(error, match=r"spread: expected a number above 0"):
        load(replace(spread, spread=(float("nan"), *spread.spread[1:])))
    with pytest.raises(error, match=r"text: expected at least 256 tokens, got"):
        spread.calibrate(plain, "Two words")


@pytest.mark.parametrize("drafter", [SuffixDecoding(), TokenRecycling()], ids=repr)
def test_drafts_change_no_text(plain, drafter):
    method = Quest(**FEW, unit=16)
    prompts = [asking(plain, 0.4)[-900:], text(plain)[100:500]]
    params = [
        SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=30, temperature=0.7, seed=3, ignore_eos=True),
    ]
    alone = load(method)
    expected = [alone.generate([p], q)[0].token_ids for p, q in zip(prompts, params, strict=True)]
    drafting = load(method, speculation=Speculation([drafter], controller=8))
    outputs = drafting.generate(prompts, params)
    assert [output.token_ids for output in outputs] == expected
    assert sum(output.metrics.speculation.accepted for output in outputs) > 0
    drafting.engine.kv_cache.check_integrity()


def test_a_window_and_blocks_are_within_the_budget():
    with pytest.raises(effinfer.InvalidArgumentError, match="budget: expected at least 640"):
        InfLLMV2(budget=600, local=512)

"""Verifiers with a draft model that drafts: texts of the pair in examples/pair have the frequencies
that the target alone gives them."""

import itertools
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from effinfer import _core
from effinfer.checkpoints.model_files import ModelFiles, open_model
from effinfer.speculation import Speculation
from tests.runtime.test_drafts import make_engine

FOLDER = Path(__file__).parents[2] / "examples" / "pair"
SLOW = os.environ.get("EFFINFER_SLOW_TESTS") == "1"
DRAWS = 1_000_000 if SLOW else 2_000
LENGTH = 4
PROMPT = "The statement is used to "
# What is drawn from, and the shape of drafts (length, width).
CASES: list[tuple[dict[str, Any], tuple[int, int]]] = [
    ({"temperature": 0.8, "top_k": 4}, (2, 1)),
    ({"temperature": 1.5, "top_k": 5}, (2, 3)),
    ({"temperature": 1.0, "top_k": 6, "top_p": 0.9}, (2, 2)),
]


@pytest.fixture(scope="module")
def pair() -> tuple[ModelFiles, ModelFiles]:
    return open_model(FOLDER / "target.gguf"), open_model(FOLDER / "draft.gguf")


def probabilities(logits: np.ndarray, params: dict[str, Any]) -> np.ndarray:
    """Top-k, temperature, top-p: what sampling says that it does (docs/sampling.md)."""
    order = np.argsort(-logits, kind="stable")[: params["top_k"]]
    p = np.exp((logits[order] - logits[order[0]]) / params["temperature"])
    p /= p.sum()
    before = np.cumsum(p) - p
    p[before >= params.get("top_p", 1.0)] = 0.0
    out = np.zeros(len(logits))
    out[order] = p / p.sum()
    return out


def expected_texts(
    engine: _core.Engine, prompt: list[int], params: dict[str, Any]
) -> dict[tuple[int, ...], float]:
    """Of all texts of LENGTH tokens that can be drawn."""
    texts: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for text, mass in texts.items():
            logits = engine.logits([*prompt, *text], "decode")[-1].astype(np.float64)
            p = probabilities(logits, params)
            longer.update({(*text, int(t)): mass * p[t] for t in np.nonzero(p)[0]})
        texts = longer
    assert abs(sum(texts.values()) - 1.0) < 1e-9
    return texts


def drawn_texts(
    engine: _core.Engine, prompt: list[int], params: dict[str, Any], draws: int
) -> tuple[Counter[tuple[int, ...]], int]:
    """How often each came, and how many drafted tokens were accepted."""
    counts: Counter[tuple[int, ...]] = Counter()
    texts: dict[int, list[int]] = {}
    accepted, seeds = 0, itertools.count()
    for first in range(0, draws, 64):
        for _ in range(min(64, draws - first)):
            sampling = _core.SamplingParams(
                seed=next(seeds), max_tokens=LENGTH, ignore_eos=True, **params
            )
            texts[engine.add(prompt, sampling)] = []
        while engine.has_work():
            for output in engine.step():
                assert output.error == "" and output.warning == ""
                texts[output.request] += output.token_ids
                if output.finish_reason is None:
                    continue
                counts[tuple(texts.pop(output.request))] += 1
                accepted += engine.metrics(output.request)["speculation"]["accepted"]
                engine.forget(output.request)
    return counts, accepted


def fit(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """The p-value of Pearson's chi-square; rare texts are one cell. 0 for a text that cannot be."""
    if set(counts) - set(expected):
        return 0.0
    draws, statistic, cells, rest, rest_seen = sum(counts.values()), 0.0, 0, 0.0, 0
    for text, p in expected.items():
        if p * draws < 5:
            rest, rest_seen = rest + p * draws, rest_seen + counts[text]
            continue
        statistic += (counts[text] - p * draws) ** 2 / (p * draws)
        cells += 1
    if rest > 0:
        statistic, cells = statistic + (rest_seen - rest) ** 2 / rest, cells + 1
    half = torch.tensor([(cells - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def measure(
    pair: tuple[ModelFiles, ModelFiles],
    verify: str,
    params: dict[str, Any],
    shape: tuple[int, int],
    draws: int,
) -> tuple[float, int]:
    target, draft = pair
    options = {"precision": "f32", "max_seq_len": 128, "max_sequences": 64}
    prompt = list(target.tokenizer().encode(PROMPT))
    expected = expected_texts(make_engine(target, **options), prompt, params)
    drafts = _core.draft_model_proposer(
        draft.graph, draft.weights, length=shape[0], width=shape[1], num_pages=300, adaptive=False
    )
    speculation = Speculation([drafts], verify=verify, controller=shape[0] * shape[1]).build()
    engine = make_engine(target, speculation=speculation, **options)
    counts, accepted = drawn_texts(engine, prompt, params, draws)
    return fit(counts, expected), accepted


@pytest.mark.parametrize(("params", "shape"), CASES, ids=str)
@pytest.mark.parametrize("verify", ["rejection", "traversal", "match"])
def test_texts_have_the_frequencies_of_the_target(pair, verify, params, shape):
    p, accepted = measure(pair, verify, params, shape, DRAWS)
    print(f"{verify} {params} {shape}: p = {p:.3f}, {accepted / DRAWS:.2f} accepted a text")
    assert p * 3 * len(CASES) > 0.001  # Bonferroni
    assert accepted > DRAWS / 5  # the test is of drafts that are accepted


def test_a_lossy_verifier_is_found(pair):
    p, _ = measure(pair, "typical", *CASES[1], 6_000)
    assert p < 1e-6


def test_the_pair_is_small_and_of_one_vocabulary(pair):
    sizes = [(FOLDER / f"{name}.gguf").stat().st_size for name in ("target", "draft")]
    assert sum(sizes) < 2e6
    assert [files.graph.metadata["num_layers"] for files in pair] == [6, 1]
    assert len({files.graph.metadata["vocab_size"] for files in pair}) == 1

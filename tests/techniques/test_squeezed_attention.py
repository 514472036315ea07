"""Squeezed Attention: clusters of a context that many requests share."""

from typing import Any

import numpy as np
import pytest

import effinfer
from effinfer import LLM, SamplingParams
from effinfer.techniques import Quest, SqueezedAttention, squeezed_attention
from effinfer.techniques.clusters import halved
from effinfer.techniques.key_channels import queries_and_keys
from effinfer.testing import make_model
from tests.model_files import smollm2_path
from tests.techniques.test_prefill import text
from tests.techniques.watching import watching

HEADS = 4  # of two layers with two KV heads each
FEW = {"budget": 256, "min_tokens": 0, "skip_layers": 0}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_model("llama-tiny", tmp_path_factory.mktemp("models") / "m.gguf", context=1024)


def prompt_of(count: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng([seed, count]).integers(0, 250, count).tolist()
    return tokens


def load(path: Any, *techniques: Any, **options: Any) -> LLM:
    return LLM(path, techniques=list(techniques), threads=1, **options)


def generate(llm: LLM, prompts: list[list[int]], count: int = 12) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    assert [output.error for output in outputs] == [""] * len(prompts)
    llm.engine.kv_cache.check_integrity()
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("count", [16, 32, 48, 400, 656])
def test_halves_are_all_keys_in_clusters_of_whole_units(count):
    """Four clusters of 16 keys, far from each other, are the units."""
    rng = np.random.default_rng(count)
    keys = rng.normal(size=(count, 16)).astype(np.float32)
    order = halved(keys, 16)
    np.testing.assert_array_equal(np.sort(order), np.arange(count))
    own = keys[order].reshape(-1, 16, 16)
    around = keys.reshape(-1, 16, 16)
    if count > 32:
        assert own.var(axis=1).sum() < 0.97 * around.var(axis=1).sum()
    centres = np.zeros((4, 16))
    centres[:, 0], centres[:, 1] = [-200, -200, 200, 200], [-50, 50, -50, 50]
    apart = (centres[np.arange(64) % 4] + rng.normal(size=(64, 16))).astype(np.float32)
    units = (halved(apart, 16) % 4).reshape(-1, 16)
    assert (units == units[:, :1]).all()


def test_equal_keys_have_an_order_too():
    order = halved(np.zeros((80, 4), np.float32), 16)
    np.testing.assert_array_equal(order, np.arange(80))


def test_each_head_has_its_clusters_behind_each_other(path):
    before: list[np.ndarray] = []
    after: list[np.ndarray] = []

    def rows(sequence: Any) -> list[np.ndarray]:
        assert sequence.num_heads == HEADS
        heads = range(sequence.num_heads)
        return [np.hstack([sequence.keys(h), sequence.values(h)]) for h in heads]

    first = watching(lambda sequence: before.extend(rows(sequence)), when="prompt_end")
    llm = load(path, first)
    generate(llm, [prompt_of(300)], 2)
    last = watching(lambda sequence: after.extend(rows(sequence)), when="every", tokens=1)
    llm = load(path, SqueezedAttention(**FEW, context=280), last)
    generate(llm, [prompt_of(300)], 3)
    assert len(before) == HEADS
    for plain, ordered in zip(before, after[:HEADS], strict=True):
        np.testing.assert_array_equal(ordered[:64], plain[:64])
        np.testing.assert_array_equal(ordered[256:300], plain[256:])
        expected = plain[64:256][halved(plain[64:256, : plain.shape[1] // 2], 16)]
        np.testing.assert_array_equal(ordered[64:256], expected)
        assert not np.array_equal(ordered, plain)


def test_a_context_is_clustered_once(path, monkeypatch):
    """For all prompts that begin with it, whoever asks; their texts are those of each alone."""
    calls: list[int] = []

    def counting(keys: np.ndarray, unit: int) -> np.ndarray:
        calls.append(len(keys))
        return halved(keys, unit)

    monkeypatch.setattr(squeezed_attention, "halved", counting)
    method = SqueezedAttention(**FEW, context=450)
    context = prompt_of(450)
    prompts = [[*context, *prompt_of(20 + i, seed=i)] for i in range(4)]
    alone = [generate(load(path, method, prefix_cache=False), [p])[0] for p in prompts]
    assert calls == [384] * (4 * HEADS)
    calls.clear()
    llm = load(path, method)
    assert generate(llm, prompts[:3]) == alone[:3]
    assert generate(llm, prompts) == alone
    assert len(calls) == HEADS
    other = [7, *context]
    generate(llm, [other])
    assert len(calls) == 2 * HEADS


def test_prompts_within_the_budget_keep_their_order(path):
    asked: list[list[int]] = [prompt_of(256), prompt_of(100)]
    plain = generate(load(path), asked, 3)
    assert generate(load(path, SqueezedAttention(**FEW, context=200)), asked, 3) == plain


def test_clusters_hold_more_attention_than_bounds_of_neighbours():
    """What the heads of a real model give, of a fourth of the keys that 64 rows choose from."""
    llm = LLM(smollm2_path(), threads=1, max_seq_len=512)
    held: dict[str, list[float]] = {"clusters": [], "bounds": []}
    layers = list(queries_and_keys(llm.files, text(llm)[:512]))
    for q, k in layers[2::4]:
        for head in range(k.shape[1]):
            rows, keys = q[-64:, head].astype(np.float64), k[:448, head]
            logits = np.einsum("rgd,kd->rgk", rows, keys) / keys.shape[1] ** 0.5
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            weights /= weights[..., 64:].sum(-1, keepdims=True)
            order = 64 + halved(keys[64:], 16)
            units = keys[order].reshape(-1, 16, keys.shape[1])
            own = np.einsum("rgd,ud->rgu", rows, units.mean(1))
            held["clusters"].append(share_held(own, weights[..., order]))
            units = keys[64:].reshape(-1, 16, keys.shape[1])
            least, most = units.min(1), units.max(1)
            highest = np.einsum("rgd,ud->rgu", np.maximum(rows, 0), most)
            highest += np.einsum("rgd,ud->rgu", np.minimum(rows, 0), least)
            held["bounds"].append(share_held(highest, weights[..., 64:]))
    assert np.mean(held["clusters"]) > np.mean(held["bounds"]) + 0.05


def share_held(scores: np.ndarray, weights: np.ndarray) -> float:
    """Of the weights [rows, group, keys], by the best fourth of the units of 16 neighbours that
    scores [rows, group, units] choose, each head with a softmax."""
    logits = scores / 8
    logits = logits - logits.max(-1, keepdims=True)
    votes = (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).max(1)
    chosen = np.argsort(-votes, axis=-1)[:, : votes.shape[1] // 4]
    of_units = weights.mean(1).reshape(len(weights), -1, 16).sum(-1)
    return float(np.take_along_axis(of_units, chosen, -1).sum(-1).mean())


def test_methods_that_drop_keys_are_refused_beside_it(path):
    with pytest.raises(effinfer.ConflictError, match="kv.resident"):
        load(path, SqueezedAttention(), effinfer.techniques.SnapKV())
    with pytest.raises(effinfer.ConflictError, match="decode.visits"):
        load(path, SqueezedAttention(), Quest())

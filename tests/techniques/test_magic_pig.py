"""MagicPIG on a real model and on attention that is spread over all keys: its mean is that of all
keys where the highest keys' is not, drafts change no text, and what calibrate() finds."""

from dataclasses import replace
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest

import effinfer
from effinfer import SamplingParams, Speculation, ops
from effinfer.techniques import Chelsea, MagicPIG, Quest, SuffixDecoding
from effinfer.techniques.key_channels import queries_and_keys
from effinfer.techniques.kv_rows import keys_and_values
from tests.techniques.fed_text import likelihoods_behind
from tests.techniques.test_prefill import text
from tests.techniques.test_sparse_decode import HEAD_DIM, KV_HEADS, LAYERS, load

PAGE = 64


@pytest.fixture(scope="module")
def plain() -> effinfer.LLM:
    return load()


@pytest.fixture(scope="module")
def method(plain) -> MagicPIG:
    return MagicPIG(min_tokens=0).calibrate(plain, plain.detokenize(text(plain)[:500]))


class OneRow:
    """The last token of a sequence: q [KV heads, group, dim]; k, v [n, KV heads, dim]."""

    def __init__(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> None:
        self.q, (self.length, self.heads, dim) = q, k.shape
        logits = np.einsum("hgd,nhd->hgn", q.astype(float), k.astype(float)) * scale
        self.terms = np.exp(logits - logits.max(-1, keepdims=True))
        self.values = np.concatenate([v.astype(float), np.ones((*v.shape[:2], 1))], axis=-1)
        pages = np.arange(-(-self.length // PAGE), dtype=np.int32)
        ends = (np.array(each, np.int32) for each in ([0, 1], [0, len(pages)]))
        self.lists = (*ends, pages, np.array([self.length], np.int32))
        self.kv = ops.PagedKv(len(pages), self.heads, dim, "f32")
        rows = np.array([0, self.length], np.int32)
        ops.kv_append(
            self.kv, np.ascontiguousarray(k), np.ascontiguousarray(v), rows, *self.lists[1:]
        )

    def sums(self, weights: np.ndarray) -> np.ndarray:
        """Of values and of exponentials: [KV heads, group, dim + 1], by how often keys count."""
        return np.einsum("hgn,hn,nhd->hgd", self.terms, weights, self.values)

    def drawn(self, seed: int, bits: int, tables: int, means: np.ndarray) -> np.ndarray:
        """How often each key counts, [KV heads, n]."""
        heads, group, dim = self.q.shape
        visits = ops.Visits(
            self.lists[0], self.lists[3], heads * group, heads, generated=True, weighted=True
        )
        ops.hash_visits(
            visits,
            np.ascontiguousarray(self.q.reshape(1, heads * group, dim)),
            self.kv,
            *self.lists,
            bits=bits,
            tables=tables,
            seed=seed,
            means=means.astype(np.float32),
            sink_tokens=PAGE,
        )
        seen = np.unpackbits(visits.words[0].view(np.uint8), axis=-1, bitorder="little")
        counts = np.where(seen, np.exp(visits.log_weights[0].astype(float)), 0.0)
        return counts[:, : self.length]

    def highest(self, keys: np.ndarray) -> np.ndarray:
        """As many of them, of those that are drawn from by what heads give them together."""
        always = np.zeros(self.length, bool)
        always[:PAGE] = True
        always[((self.length - 1) // PAGE - 1) * PAGE :] = True
        shares = np.where(always, 0.0, self.terms)
        shares = (shares / shares.sum(-1, keepdims=True)).sum(1)
        chosen = np.tile(always, (self.heads, 1)).astype(float)
        for head, count in enumerate(keys - always.sum()):
            chosen[head, np.argsort(-shares[head])[: int(count)]] = 1.0
        return chosen


def error(sums: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Of each query head's output, relative."""
    got, want = (each[..., :-1] / each[..., -1:] for each in (sums, exact))
    return np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)


def test_counting_what_all_keys_say():
    """Every key is 1 or 0, and attention is spread over all of them: their mean is asked for. Those
    with the highest logits are all 1; what is drawn says how many there are."""
    rng = np.random.default_rng(3)
    length, dim = 3000, 64
    q = rng.standard_normal((1, 1, dim))
    k = rng.standard_normal((length, 1, dim))
    cosines = k[:, 0] @ q[0, 0] / np.linalg.norm(q) / np.linalg.norm(k[:, 0], axis=-1)
    v = np.zeros((length, 1, dim))
    v[:, 0, 0] = cosines + 0.05 * rng.standard_normal(length) > 0
    row = OneRow(*(each.astype(np.float32) for each in (q, k, v)), scale=0.02)
    exact = row.sums(np.ones((1, length)))[0, 0, 0] / row.sums(np.ones((1, length)))[0, 0, -1]
    errors, of_highest = [], []
    for seed in range(20):
        counts = row.drawn(seed, 6, 16, np.zeros((1, dim)))
        keys = (counts > 0).sum(-1)
        assert 200 < keys[0] < 600
        for found, weights in ((errors, counts), (of_highest, row.highest(keys))):
            sums = row.sums(weights)[0, 0]
            found.append(abs(sums[0] / sums[-1] - exact))
    assert 0.3 < exact < 0.7
    assert np.mean(errors) < 0.1
    assert np.mean(of_highest) > 0.15
    assert np.mean(errors) < np.mean(of_highest) / 2


def test_on_average_it_is_nearer_than_as_many_of_the_highest_keys(plain, method):
    """Of SmolLM2's own queries, keys and values: the mean of what 200 seeds draw."""
    ids = text(plain)[:512]
    means = np.array(method.means).reshape(LAYERS, KV_HEADS, HEAD_DIM) / 1024
    values = list(keys_and_values(plain.files, ids, rotated=True))[1::2]
    of_drawn, of_highest, once = [], [], []
    for layer, (q, k) in enumerate(queries_and_keys(plain.files, ids)):
        if layer % 8 != 5:
            continue
        row = OneRow(q[-1], k, values[layer].reshape(k.shape), HEAD_DIM**-0.5)
        exact = row.sums(np.ones((KV_HEADS, row.length)))
        draws = [row.drawn(seed, 6, 8, means[layer]) for seed in range(200)]
        of_drawn.append(error(sum(row.sums(counts) for counts in draws), exact))
        once.append(np.mean([error(row.sums(counts), exact) for counts in draws], axis=0))
        keys = np.mean([(counts > 0).sum(-1) for counts in draws], axis=0)
        of_highest.append(error(row.sums(row.highest(keys)), exact))
    assert np.mean(of_drawn) < 0.25 * np.mean(once)
    assert np.mean(of_drawn) < np.mean(of_highest)


def likelihood(*methods: Any) -> float:
    """Of 150 tokens of Python's documentation behind 850, one by one."""
    llm = load(*methods, max_seq_len=1100)
    pages = " ".join(topics[name] for name in sorted(topics))
    tokens = llm.tokenize(pages[:20000])[1400:2400]
    return float(likelihoods_behind(llm, tokens, 850).mean())


def test_generated_text_stays_nearly_as_likely(method):
    """What is drawn gives back most of what the keys that are visited in any case lack."""
    dense, drawn = likelihood(), likelihood(replace(method, bits=6, tables=24))
    least = likelihood(Quest(budget=192, min_tokens=0))
    assert drawn != dense
    assert drawn > dense - 0.25 * (dense - least)


def test_drafts_change_no_text(plain, method):
    prompts = [text(plain)[:900], text(plain)[100:500]]
    params = [
        SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=20, temperature=0.7, seed=3, ignore_eos=True),
    ]
    alone = load(method)
    expected = [alone.generate([p], q)[0].token_ids for p, q in zip(prompts, params, strict=True)]
    drafting = load(method, speculation=Speculation([SuffixDecoding()], controller=8))
    outputs = drafting.generate(prompts, params)
    assert [output.token_ids for output in outputs] == expected
    assert sum(output.metrics.speculation.accepted for output in outputs) > 0
    drafting.engine.kv_cache.check_integrity()


def test_means_are_of_the_model(plain, method):
    ids = plain.tokenize(plain.detokenize(text(plain)[:500]))
    keys = [k.astype(float).mean(0) for _, k in queries_and_keys(plain.files, ids)]
    np.testing.assert_allclose(np.array(method.means) / 1024, np.ravel(keys), atol=0.51 / 1024)
    error = effinfer.InvalidArgumentError
    with pytest.raises(error, match=r"means: expected 5760 \(keys of 30 layers\)"):
        load(replace(method, means=method.means[1:]))
    with pytest.raises(error, match=r"text: expected at least 256 tokens, got"):
        method.calibrate(plain, "Two words")


def test_keys_that_stand_for_others_are_refused(method):
    with pytest.raises(effinfer.UnsupportedError, match=r"weights: expected no plane of them"):
        load(method, Chelsea())

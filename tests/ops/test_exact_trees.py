"""Rows of a tree of drafts have the bits of steps that hold their paths alone."""

from typing import Any

import numpy as np
import pytest

from effinfer import _core
from tests.draft_trees import PAGE, paths_of, random_parents, stays
from tests.ops.reference import slopes

HEADS, KV_HEADS, DIM = 6, 2, 32
# Trees within a page, at its borders, on two pages of a chunk of 256 tokens, on two chunks.
CONTEXTS = [0, 3, 41, 62, 64, 120, 250, 256, 320, 507]
OPTIONS = {
    "plain": {},
    "window": {"window_left": 7, "logits_soft_cap": 3.0},
    "sinks": {"window_left": 70, "sink_tokens": 44},
    "biases": {
        "alibi_slopes": slopes(HEADS).astype(np.float32),
        "sink_logits": np.linspace(-1, 2, HEADS, dtype=np.float32),
    },
}


def cumulated(counts: list[int]) -> np.ndarray:
    return np.cumsum([0, *counts]).astype(np.int32)


class Tree:
    """A tree behind a context, and its paths as sequences that share the context's whole pages."""

    def __init__(self, rng: np.random.Generator, context: int, rows: int, dtype: str) -> None:
        self.context = context
        self.parents = random_parents(rng, rows)
        self.paths = paths_of(self.parents)
        k, v = rng.standard_normal((2, context + rows, KV_HEADS, DIM), np.float32)
        k[rng.integers(0, context + rows, 3)] *= 6  # a maximum that grows on the way
        shared = context // PAGE * PAGE
        lengths = [context + rows, *(context + len(path) for path in self.paths)]
        own = [-(-n // PAGE) - (shared // PAGE if s else 0) for s, n in enumerate(lengths)]
        order = rng.permutation(sum(own)).astype(np.int32)
        self.pages = np.split(order, np.cumsum(own)[:-1])
        for s in range(1, len(lengths)):
            self.pages[s] = np.concatenate([self.pages[0][: shared // PAGE], self.pages[s]])
        self.lengths = np.array(lengths, np.int32)
        self.kv = _core.PagedKv(sum(own), KV_HEADS, DIM, dtype)
        tokens = [list(range(context + rows))]
        tokens += [[*range(shared, context), *(context + i for i in p)] for p in self.paths]
        flat = np.concatenate(tokens).astype(np.int64)
        qo_indptr = cumulated([len(t) for t in tokens])
        every = range(len(lengths))
        _core.kv_append(self.kv, k[flat], v[flat], qo_indptr, *self.lists(every))
        self.q = rng.standard_normal((rows, HEADS, DIM), np.float32)

    def lists(self, sequences: range) -> tuple[np.ndarray, ...]:
        pages = [self.pages[s] for s in sequences]
        return cumulated([len(p) for p in pages]), np.concatenate(pages), self.lengths[sequences]

    def together(self, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        parents = np.array(self.parents, np.int32)
        rows = np.array([0, len(parents)], np.int32)
        return _core.paged_attention(
            self.q,
            self.kv,
            rows,
            *self.lists(range(1)),
            parents=parents,
            return_lse=True,
            **options,
        )

    def alone(self, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        rows = np.arange(len(self.parents) + 1, dtype=np.int32)
        paths = range(1, len(self.lengths))
        return _core.paged_attention(
            self.q, self.kv, rows, *self.lists(paths), return_lse=True, **options
        )


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "i8"])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_row_has_the_bits_of_its_path_alone(isa, dtype, name):
    rng = np.random.default_rng(len(isa) + len(name))
    displaced = moved = 0
    for context in 4 * CONTEXTS:
        tree = Tree(rng, context, int(rng.integers(2, 65)), dtype)
        together, alone = tree.together(**OPTIONS[name]), tree.alone(**OPTIONS[name])
        exact = [stays(context, path) for path in tree.paths]
        for got, expected in zip(together, alone, strict=True):
            np.testing.assert_array_equal(got[exact], expected[exact])
            np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-5)
        off = [path[-1] != len(path) - 1 for path in tree.paths]
        displaced += sum(a and b for a, b in zip(off, exact, strict=True))
        moved += exact.count(False)
    assert displaced > 200
    assert moved > 0


def test_products_of_bfloat16_are_near(isa):
    if not _core.has_avx512_bf16() or isa not in ("avx512", "amx"):
        return  # no such products at this level
    rng = np.random.default_rng(3)
    for context in CONTEXTS:
        tree = Tree(rng, context, 40, "bf16")
        for options in OPTIONS.values():
            got, _ = tree.together(arithmetic="bf16", **options)
            expected, _ = tree.alone(arithmetic="bf16", **options)
            np.testing.assert_allclose(got, expected, rtol=0.05, atol=0.05)

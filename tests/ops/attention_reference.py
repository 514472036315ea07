"""Paged batches at random and attention over them in float64."""

from dataclasses import dataclass

import numpy as np

from effinfer import _core

PAGE = 64


@dataclass
class Batch:
    """Sequences as (tokens in the cache, query rows), with pages scattered over a pool."""

    kv_len: np.ndarray
    qo_indptr: np.ndarray
    kv_indptr: np.ndarray
    kv_indices: np.ndarray
    num_pages: int

    @property
    def lists(self) -> tuple[np.ndarray, ...]:
        return self.qo_indptr, self.kv_indptr, self.kv_indices, self.kv_len

    def rows(self, sequence: int) -> slice:
        return slice(self.qo_indptr[sequence], self.qo_indptr[sequence + 1])

    def pages(self, sequence: int) -> np.ndarray:
        return self.kv_indices[self.kv_indptr[sequence] : self.kv_indptr[sequence + 1]]

    def part(self, sequence: int, first: int, last: int) -> "Batch":
        """The sequence alone, at the step whose query rows are its tokens [first, last)."""
        pages = self.pages(sequence)
        return Batch(
            np.array([last], np.int32),
            np.array([0, last - first], np.int32),
            np.array([0, len(pages)], np.int32),
            pages,
            self.num_pages,
        )


def make_batch(rng: np.random.Generator, kv_lens: list[int], qo_lens: list[int]) -> Batch:
    counts = [-(-n // PAGE) for n in kv_lens]
    spare = 3
    order = rng.permutation(sum(counts) + spare)
    return Batch(
        np.array(kv_lens, np.int32),
        np.cumsum([0, *qo_lens]).astype(np.int32),
        np.cumsum([0, *counts]).astype(np.int32),
        order[: sum(counts)].astype(np.int32),
        sum(counts) + spare,
    )


def whole(batch: Batch) -> Batch:
    """The same sequences with every token as a query row: what appends all of their KV."""
    return Batch(
        batch.kv_len,
        np.cumsum([0, *batch.kv_len]).astype(np.int32),
        batch.kv_indptr,
        batch.kv_indices,
        batch.num_pages,
    )


def fill(
    rng: np.random.Generator, batch: Batch, kv_heads: int, head_dim: int, dtype: str
) -> tuple["_core.PagedKv", list[np.ndarray], list[np.ndarray]]:
    """Pages with random KV; and what they hold, a sequence [kv_len, kv_heads, head_dim] each."""
    kv = _core.PagedKv(batch.num_pages, kv_heads, head_dim, dtype)
    # What an earlier owner left in the pages must never show.
    stale = np.full((PAGE * batch.num_pages, kv_heads, head_dim), np.nan, np.float32)
    everything = np.array([0, batch.num_pages], np.int32)
    tokens = np.array([PAGE * batch.num_pages], np.int32)
    pages = np.arange(batch.num_pages, dtype=np.int32)
    _core.kv_append(kv, stale, stale, everything * PAGE, everything, pages, tokens)
    full = whole(batch)
    shape = (int(full.qo_indptr[-1]), kv_heads, head_dim)
    k = rng.standard_normal(shape, np.float32)
    v = rng.standard_normal(shape, np.float32)
    _core.kv_append(kv, k, v, *full.lists)
    k_pages, v_pages = kv.to_numpy()

    def logical(pool: np.ndarray, sequence: int) -> np.ndarray:
        pages = pool[batch.pages(sequence)].transpose(0, 2, 1, 3)
        return pages.reshape(-1, kv_heads, head_dim)[: batch.kv_len[sequence]]

    count = len(batch.kv_len)
    return (
        kv,
        [logical(k_pages, s) for s in range(count)],
        [logical(v_pages, s) for s in range(count)],
    )


def reference(
    q: np.ndarray,
    keys: list[np.ndarray],
    values: list[np.ndarray],
    batch: Batch,
    scale: float,
    window: int = -1,
    soft_cap: float = 0.0,
    sinks: int = 0,
    parents: np.ndarray | None = None,
    *,
    visited: list[np.ndarray] | None = None,
    added: list[np.ndarray] | None = None,
    of_probabilities: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """The output in float64, and the magnitude that its rounding errors are relative to; with
    `of_probabilities` that of roundings of the probabilities alone. `visited`: for each sequence a
    bool [kv_heads, rows, kv_len] of what rows see of what causality lets them; `added`: likewise
    what is added to logits."""
    out = np.zeros(q.shape)
    magnitude = np.zeros(q.shape)
    for s, (k, v) in enumerate(zip(keys, values, strict=True)):
        rows = batch.rows(s)
        count = rows.stop - rows.start
        if count == 0:
            continue
        group = q.shape[1] // k.shape[1]
        k64 = np.repeat(k.astype(np.float64), group, axis=1)
        v64 = np.repeat(v.astype(np.float64), group, axis=1)
        q64 = q[rows].astype(np.float64)
        scores = np.einsum("thd,shd->hts", q64, k64) * scale
        # A score's error is relative to the sum of absolute products, and moves a probability by
        # as much: an error of p in absolute terms of that size.
        spread = np.einsum("thd,shd->hts", np.abs(q64), np.abs(k64)).max() * abs(scale)
        if of_probabilities:
            spread = 0.0
        if soft_cap > 0:
            scores = soft_cap * np.tanh(scores / soft_cap)
        # Where tokens lie, and which position they stand for: depths in a tree.
        start = len(k) - count
        key = np.arange(len(k))
        seen = key[None, :] <= np.arange(start, len(k))[:, None]
        if parents is not None:
            seen[:, start:] = False
            for i, parent in enumerate(parents[rows]):
                if parent >= 0:
                    seen[i, start:] = seen[parent, start:]
                    key[start + i] = key[start + parent] + 1
                else:
                    key[start + i] = start
                seen[i, start + i] = True
        if window >= 0:
            near = key[None, :] >= key[start:, None] - window
            seen &= near | (key < sinks)[None, :]
        if visited is not None:
            seen = seen[None] & np.repeat(visited[s], group, axis=0)
        if added is not None:
            scores += np.repeat(added[s], group, axis=0)
        scores = np.where(seen, scores, -np.inf)
        highest = np.maximum(scores.max(axis=-1, keepdims=True), -1e30)
        p = np.exp(scores - highest)
        total = p.sum(axis=-1, keepdims=True)
        p /= np.where(total == 0, 1, total)
        out[rows] = np.einsum("hts,shd->thd", p, v64)
        magnitude[rows] = np.einsum("hts,shd->thd", p, np.abs(v64)) * (1 + spread)
    return out, magnitude

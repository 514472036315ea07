"""Which query rows and keys the sequences of an attention call have."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from effinfer.ops.shared.arrays import Array
from effinfer.ops.shared.options import Indices, expect, indices, indptr, page_lengths


@dataclass(frozen=True)
class Sequences:
    """Query rows and tokens of a batch: pages, or with kv_indices None rows of ragged keys."""

    qo_indptr: Indices  # [S + 1]
    kv_indptr: Indices  # [S + 1]
    kv_indices: Indices | None
    kv_len: Indices  # [S]
    page_size: int = 1

    @classmethod
    def single(cls, rows: int, tokens: int) -> "Sequences":
        """One sequence with ragged keys."""
        first = np.zeros(1, np.int32)
        kv_len = np.array([tokens], np.int32)
        return cls(np.append(first, np.int32(rows)), np.append(first, kv_len), None, kv_len)

    @classmethod
    def paged(
        cls,
        op: str,
        qo_indptr: Any,
        kv_indptr: Any,
        kv_indices: Any,
        last_page_len: Any,
        page_size: int,
        names: tuple[str, str, str],
    ) -> "Sequences":
        """The sequences of FlashInfer's lists, checked; qo_indptr None: a row a sequence."""
        pages = indptr(kv_indptr, f"[{op}] {names[0]}")
        listed = indices(kv_indices, f"[{op}] {names[1]}")
        ok = pages[-1] <= listed.size
        expect(ok, f"[{op}] {names[0]}", f"at most {listed.size}, the page indices", pages[-1])
        ok = not listed.size or int(listed.min()) >= 0
        expect(ok, f"[{op}] {names[1]}", "no negative page", "one")
        lengths = page_lengths(op, pages, last_page_len, names[2], page_size)
        if qo_indptr is None:
            rows = np.arange(pages.size, dtype=np.int32)
        else:
            rows = indptr(qo_indptr, f"[{op}] qo_indptr", pages.size)
        return cls(rows, pages, listed, lengths, page_size)

    @property
    def listed_pages(self) -> Indices:
        """The page indices that the sequences use; empty for ragged keys."""
        pages = self.kv_indices
        return np.zeros(0, np.int32) if pages is None else pages[: self.kv_indptr[-1]]

    def query_positions(self) -> Indices:
        """The position of every row: a sequence's rows are its last tokens."""
        rows = np.diff(self.qo_indptr)
        shift = self.kv_len - self.qo_indptr[1:]
        return (np.arange(self.qo_indptr[-1]) + np.repeat(shift, rows)).astype(np.int32)

    def token_positions(self) -> Indices:
        """The position of every token, sequence after sequence."""
        ends = np.cumsum(self.kv_len, dtype=np.int64)
        return (np.arange(self.kv_len.sum()) - np.repeat(ends - self.kv_len, self.kv_len)).astype(
            np.int32
        )

    def ragged(self) -> "Sequences":
        """These sequences, with their tokens gathered one after the other."""
        starts = np.concatenate([[0], np.cumsum(self.kv_len)]).astype(np.int32)
        return Sequences(self.qo_indptr, starts, None, self.kv_len)

    def gather(self, cache: Array, layout: str) -> Array:
        """Every token's row [N, H, D] of pages or of ragged rows."""
        tokens = self.token_positions()
        if self.kv_indices is None:
            ok = cache.shape[0] >= self.kv_indptr[-1]
            expect(ok, "[attention] k", f"{self.kv_indptr[-1]} rows", f"shape {cache.shape}")
            return cache[tokens + np.repeat(self.kv_indptr[:-1], self.kv_len)]
        pages = self.kv_indices[
            tokens // self.page_size + np.repeat(self.kv_indptr[:-1], self.kv_len)
        ]
        count = int(pages.max(initial=-1)) + 1
        size = cache.shape[1 if layout == "NHD" else 2]
        ok = cache.shape[0] >= count and size == self.page_size
        expected = f"{count} or more pages of {self.page_size} tokens"
        expect(ok, "[attention] k", expected, f"shape {cache.shape}")
        slots = tokens % self.page_size
        return cache[pages, slots] if layout == "NHD" else cache[pages, :, slots]


@dataclass(frozen=True)
class Heads:
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int

    def check(self, op: str) -> "Heads":
        for name in ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo"):
            value = getattr(self, name)
            expect(value > 0, f"[{op}] {name}", "a positive number", value)
        ok = self.num_qo_heads % self.num_kv_heads == 0
        argument = f"[{op}] num_qo_heads"
        expect(ok, argument, f"a multiple of {self.num_kv_heads} KV heads", self.num_qo_heads)
        return self

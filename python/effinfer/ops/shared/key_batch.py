"""The queries and the keys of a batch, which scores and indices are made from."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from effinfer import _core
from effinfer._core import InvalidArgumentError, PagedKv
from effinfer.ops.shared.options import (
    LAYOUTS,
    Indices,
    contiguous_rows,
    expect,
    indices,
    indptr,
    one_of,
    view_3d,
)
from effinfer.ops.shared.places import HOST, AnyView, DevicePlace, Place


@dataclass(frozen=True)
class KeyBatch:
    """q [T, num_qo_heads, head_dim]: the rows qo_indptr[s]:qo_indptr[s + 1] of sequence s are its
    last tokens (default: one sequence). The keys, float32, float16, bfloat16 or 8-bit ones:

    - ragged: k [N, num_kv_heads, head_dim] (NHD) or heads first (HND), of sequence s the rows
      kv_indptr[s]:kv_indptr[s + 1] (default: one sequence);
    - paged: k [pages, page_size, num_kv_heads, head_dim] (NHD) or [pages, num_kv_heads, page_size,
      head_dim] (HND), of sequence s the first kv_len[s] tokens of the pages
      kv_indices[kv_indptr[s]:kv_indptr[s + 1]].

    - the engine's pages: k a `PagedKv`, 64 tokens a page, with the same index vectors.

    Every index vector is int32.
    """

    q: AnyView
    k: AnyView | PagedKv
    qo_indptr: Indices
    kv_indptr: Indices
    kv_indices: Indices | None
    kv_len: Indices
    page_size: int
    kv_layout: str

    @classmethod
    def of(
        cls,
        op: str,
        q: Any,
        k: Any,
        *,
        qo_indptr: Any = None,
        kv_indptr: Any = None,
        kv_indices: Any = None,
        kv_len: Any = None,
        kv_layout: str = "NHD",
        at: Place = HOST,
    ) -> "KeyBatch":
        rows, keys = view_3d(q, f"[{op}] q", at), k
        one_of(kv_layout, LAYOUTS, f"[{op}] kv_layout")
        paged = kv_indices is not None
        if isinstance(k, PagedKv):
            expect(paged, f"[{op}] kv_indices", "an array with PagedKv", None)
            page_size = int(k.page_size)
        else:
            keys = at.view(k, f"[{op}] k")
            rank = 4 if paged else 3
            expect(keys.ndim == rank, f"[{op}] k", f"{rank} dimensions", f"shape {keys.shape}")
            if not paged and kv_layout == "HND":
                keys, kv_layout = keys.swapaxes(0, 1), "NHD"
            page_size = keys.shape[1 if kv_layout == "NHD" else 2] if paged else 1
            keys = contiguous_rows(keys)
        if paged:
            for name, given in (("kv_indptr", kv_indptr), ("kv_len", kv_len)):
                expect(given is not None, f"[{op}] {name}", "an array with kv_indices", None)
        elif kv_indptr is None:
            kv_indptr = np.array([0, keys.shape[0]], np.int32)
        starts = indptr(kv_indptr, f"[{op}] kv_indptr")
        if kv_len is None:
            kv_len = np.diff(starts)
        if qo_indptr is None:
            qo_indptr = np.array([0, rows.shape[0]], np.int32)
        row_starts = indptr(qo_indptr, f"[{op}] qo_indptr", starts.size)
        count = rows.shape[0]
        expect(row_starts[-1] == count, f"[{op}] qo_indptr", f"{count} last", row_starts[-1])
        return cls(
            contiguous_rows(rows),
            keys,
            row_starts,
            starts,
            indices(kv_indices, f"[{op}] kv_indices") if paged else None,
            indices(kv_len, f"[{op}] kv_len"),
            page_size,
            kv_layout,
        )

    def arrays(self, op: str) -> AnyView:
        """The keys of an operator that does not read the engine's pages."""
        if isinstance(self.k, PagedKv):
            raise InvalidArgumentError(f"[{op}] k: expected an array, got PagedKv")
        return self.k

    @property
    def num_qo_heads(self) -> int:
        return int(self.q.shape[1])

    @property
    def num_kv_heads(self) -> int:
        if isinstance(self.k, PagedKv):
            return self.k.num_kv_heads
        return int(self.k.shape[1 if self.k.ndim == 3 or self.kv_layout == "HND" else 2])

    @property
    def heads(self) -> tuple[int, int]:
        return self.num_qo_heads, self.num_kv_heads

    @property
    def head_dim(self) -> int:
        return int(self.q.shape[2])

    @property
    def lists(self) -> tuple[Indices, Indices, Indices | None, Indices]:
        return self.qo_indptr, self.kv_indptr, self.kv_indices, self.kv_len

    @property
    def geometry(self) -> dict[str, Any]:
        return {
            "page_size": self.page_size,
            "num_qo_heads": self.num_qo_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
        }

    def scale(self, sm_scale: float | None) -> float:
        return 1.0 / math.sqrt(max(self.head_dim, 1)) if sm_scale is None else float(sm_scale)

    def some_rows(self, chosen: list[Indices], at: Place) -> "KeyBatch":
        """A batch with only the flat rows chosen[s] of each sequence s."""
        counts = [0, *(len(rows) for rows in chosen)]
        rows = np.concatenate(chosen) if chosen else np.zeros(0, np.int32)
        first = int(rows[0]) if rows.size else 0
        adjacent = bool((rows == np.arange(first, first + rows.size)).all())
        if adjacent:
            q = self.q[first : first + rows.size]
        elif isinstance(at, DevicePlace):
            q = _core.take_rows(self.q, rows.astype(np.int32), at.executor)
        else:
            q = self.q[rows]
        starts = np.cumsum(counts).astype(np.int32)
        return KeyBatch(
            q,
            self.k,
            starts,
            self.kv_indptr,
            self.kv_indices,
            self.kv_len,
            self.page_size,
            self.kv_layout,
        )

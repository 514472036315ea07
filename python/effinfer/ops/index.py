"""Index lists: which keys blocks of query rows visit, chosen from the queries and the keys.

A method chooses keys for each query head. The kernel walks one list for each KV head and block of
rows, which holds what any head of the group chose. A block is `block_size` rows whose positions
follow each other from a multiple of it on; whatever is chosen, it visits the keys at its own rows'
positions, the first `sink_tokens` keys and the last `local_tokens` ones up to each row, and with
`causal` none behind its last row. Causality within a block is the kernel's.
On a GPU scores are made where keys lie; the host waits for them and makes the lists.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from effinfer import _core
from effinfer._core import Queue, ThreadPool
from effinfer.ops.scores import scores_into
from effinfer.ops.shared.key_batch import KeyBatch
from effinfer.ops.shared.listed import ListedAttention
from effinfer.ops.shared.options import Indices, expect, indices, indptr
from effinfer.ops.shared.places import HostPlace, Place, place_of


@dataclass(frozen=True)
class BlockIndex:
    """Lists of keys for attention."""

    lists: npt.NDArray[np.int32]  # [L, 4]: sequence, KV head, first row (flat), number of rows
    indptr: Indices  # [L + 1]: into spans
    spans: npt.NDArray[np.int32]  # [n, 2]: tokens [begin, end) of the sequence, ascending
    qo_indptr: Indices  # [S + 1]
    kv_len: Indices  # [S]
    num_qo_heads: int
    num_kv_heads: int
    block_size: int  # query rows
    causal: bool

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """[L]: keys that each list visits."""
        sizes = (self.spans[:, 1] - self.spans[:, 0]).astype(np.int64)
        return np.diff(np.concatenate([[0], np.cumsum(sizes)])[self.indptr])

    @property
    def density(self) -> float:
        """The share of what dense blocks of rows visit that these do; 1 of nothing."""
        rows = self.lists[:, 3].astype(np.int64)
        visible = self.kv_len[self.lists[:, 0]].astype(np.int64)
        if self.causal:
            visible += self.lists[:, 2] + rows - self.qo_indptr[self.lists[:, 0] + 1]
        dense = int((rows * visible).sum())
        return float((rows * self.tokens).sum()) / dense if dense else 1.0

    def plan(
        self,
        head_dim: int,
        *,
        head_dim_vo: int | None = None,
        kv_indptr: Any = None,
        kv_indices: Any = None,
        page_size: int = 1,
        window_left: int = -1,
    ) -> ListedAttention:
        """The attention over these lists: `plan.run(q, k, v, out)` as often as needed.

        Args:
            kv_indptr, kv_indices, page_size: where the keys are, as `KeyBatch` says; default:
                ragged, one sequence after the other.
        """
        op = "block index"
        if kv_indptr is None:
            expect(kv_indices is None, f"[{op}] kv_indptr", "an array with kv_indices", None)
            kv_indptr = np.concatenate([[0], np.cumsum(self.kv_len)])
        plan = _core.AttentionPlan(
            self.qo_indptr,
            indptr(kv_indptr, f"[{op}] kv_indptr", self.qo_indptr.size),
            None if kv_indices is None else indices(kv_indices, f"[{op}] kv_indices"),
            self.kv_len,
            page_size=page_size,
            num_qo_heads=self.num_qo_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim_qk=head_dim,
            head_dim_vo=head_dim if head_dim_vo is None else head_dim_vo,
            causal=self.causal,
            window_left=window_left,
            lists=self.lists,
            blocks=(self.indptr, self.spans),
        )
        return ListedAttention(plan)


def a_shape_index(
    qo_indptr: Any,
    kv_len: Any,
    num_qo_heads: int,
    num_kv_heads: int,
    *,
    sink_tokens: int = 128,
    local_tokens: int = 1024,
    block_size: int = 64,
    causal: bool = True,
    pool: ThreadPool | None = None,
) -> BlockIndex:
    """The first keys and the nearest ones: MInference's A-shape (arXiv:2407.02490, section 3), the
    prefill of StreamingLLM (arXiv:2309.17453).

    Args:
        qo_indptr, kv_len: int32 [S + 1] and [S]; a sequence's rows are its last tokens.
    """
    op = "a_shape_index"
    rows = indptr(qo_indptr, f"[{op}] qo_indptr")
    lengths = indices(kv_len, f"[{op}] kv_len")
    lists = _core.a_shape_lists(
        rows, lengths, num_kv_heads, block_size, causal, sink_tokens, local_tokens, pool
    )
    heads = (num_qo_heads, num_kv_heads)
    return block_index(lists, rows, lengths, heads, block_size, causal)


def vertical_slash_index(
    q: Any,
    k: Any,
    *,
    vertical_size: int = 1000,
    slash_size: int = 6096,
    last_q: int = 64,
    sink_tokens: int = 30,
    local_tokens: int = 100,
    block_size: int = 64,
    sm_scale: float | None = None,
    pool: ThreadPool | Queue | None = None,
    **keys: Any,
) -> BlockIndex:
    """Columns and diagonals that the last rows attend to: MInference's vertical-slash pattern
    (arXiv:2407.02490, section 3.2 and algorithm 2); causal.

    Args:
        vertical_size: keys that every row visits, the highest by `attention_scores` of the last
            `last_q` rows (at most 128) of each sequence.
        slash_size: distances at which every row visits a key, the highest by its diagonals. A block
            visits the keys at a distance of any of its rows.
        keys: the index vectors of `KeyBatch`.
    """
    op = "vertical_slash_index"
    at = place_of(q, pool, f"[{op}] q")
    batch = KeyBatch.of(op, q, k, at=at, **keys)
    for name, value in (("vertical_size", vertical_size), ("slash_size", slash_size)):
        expect(value >= 0, f"[{op}] {name}", "0 or more", value)
    expect(0 < last_q <= 128, f"[{op}] last_q", "1 to 128", last_q)
    ends, starts = batch.qo_indptr[1:], batch.qo_indptr[:-1]
    last = batch.some_rows(
        [np.arange(max(a, b - last_q), b) for a, b in zip(starts, ends, strict=True)], at
    )
    shape = (batch.num_qo_heads, int(batch.kv_len.sum()))
    columns, diagonals = at.temporary(shape, np.float32), at.temporary(shape, np.float32)
    scores_into(last, columns, diagonals, at=at, causal=True, sm_scale=sm_scale, pool=at.executor)
    slashes = at.values(diagonals)
    chosen = {"num_columns": vertical_size, "slashes": slashes, "num_slashes": slash_size}
    return _columns_index(op, batch, columns, block_size, sink_tokens, local_tokens, at, **chosen)


def sampled_index(
    q: Any,
    k: Any,
    *,
    sample_ratio: float = 0.05,
    mass: float = 0.95,
    sink_tokens: int = 4,
    local_tokens: int = 256,
    block_size: int = 64,
    sm_scale: float | None = None,
    pool: ThreadPool | Queue | None = None,
    **keys: Any,
) -> BlockIndex:
    """Columns that hold most of what sampled rows attend to, and the nearest keys: SampleAttention
    (arXiv:2406.15486, section 4.2); causal.

    Args:
        sample_ratio: the share of rows, evenly spread, the last one among them, whose probabilities
            are summed up by key.
        mass: as few columns are visited as hold this share of a head's sum.
        keys: the index vectors of `KeyBatch`.
    """
    op = "sampled_index"
    at = place_of(q, pool, f"[{op}] q")
    batch = KeyBatch.of(op, q, k, at=at, **keys)
    expect(0 < sample_ratio <= 1, f"[{op}] sample_ratio", "more than 0, at most 1", sample_ratio)
    expect(0 < mass <= 1, f"[{op}] mass", "more than 0, at most 1", mass)
    step = max(1, round(1 / sample_ratio))
    ends, starts = batch.qo_indptr[1:], batch.qo_indptr[:-1]
    rows = [np.arange(b - 1, a - 1, -step)[::-1] for a, b in zip(starts, ends, strict=True)]
    shifts = batch.kv_len - ends
    positions = np.concatenate([np.zeros(0), *(r + d for r, d in zip(rows, shifts, strict=True))])
    columns = at.temporary((batch.num_qo_heads, int(batch.kv_len.sum())), np.float32)
    scores_into(
        batch.some_rows(rows, at),
        columns,
        None,
        at=at,
        causal=True,
        sm_scale=sm_scale,
        positions=at.copied(positions.astype(np.int32)),
        pool=at.executor,
    )
    return _columns_index(
        op, batch, columns, block_size, sink_tokens, local_tokens, at, column_mass=mass
    )


def _columns_index(
    op: str,
    batch: KeyBatch,
    columns: Any,
    block_size: int,
    sink_tokens: int,
    local_tokens: int,
    at: Place,
    **chosen: Any,
) -> BlockIndex:
    """A causal index of the columns with the highest scores, float32 [num_qo_heads, tokens];
    `chosen` says how many."""
    lists = _core.column_lists(
        op,
        batch.qo_indptr,
        batch.kv_len,
        batch.num_kv_heads,
        block_size,
        True,
        sink_tokens,
        local_tokens,
        at.values(columns),
        **chosen,
        pool=at.executor if isinstance(at, HostPlace) else None,
    )
    return block_index(lists, batch.qo_indptr, batch.kv_len, batch.heads, block_size, True)


def block_index(
    lists: tuple[Any, ...],
    qo_indptr: Indices,
    kv_len: Indices,
    heads: tuple[int, int],
    block_size: int,
    causal: bool,
) -> BlockIndex:
    """Of the native lists, indptr and spans."""
    listed, starts, spans = lists
    return BlockIndex(listed, starts, spans, qo_indptr, kv_len, *heads, block_size, causal)

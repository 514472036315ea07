"""The highest of rows, by the names of flashinfer.topk: as ids, as slots of pages, as offsets.

Rows are [batch, n], float32, float16 or bfloat16. Results are the same each time and come in the
order of ids; `deterministic` and `dsa_graph_safe` have no effect. `tie_break` says which of equal
scores are chosen where not all can be: the lower ids (TopKTieBreak.NONE, SMALL) or the higher ones
(LARGE).
"""

from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from effinfer import _core
from effinfer._core import InvalidArgumentError, ThreadPool
from effinfer.ops.shared.arrays import (
    Array,
    as_kind,
    bfloat16,
    dense,
    dtype_name,
    empty,
    result,
    view,
)
from effinfer.ops.shared.options import Indices, expect, indices

Ids = npt.NDArray[np.int64]

_TYPES = ("float32", "float16", "bfloat16")
# The bits of bfloat16's negative infinity.
_LOWEST_BF16 = np.uint16(0xFF80)


class TopKTieBreak(IntEnum):
    """Which of equal scores are chosen first."""

    NONE = 0
    SMALL = 1
    LARGE = 2


def top_k(
    input: Any,
    k: int,
    sorted: bool = False,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    *,
    pool: ThreadPool | None = None,
) -> tuple[Any, Any]:
    """The k highest values of each row of input [batch, n], and their ids, int64 [batch, k].

    Highest first when `sorted`, and among equals the one that `tie_break` prefers; else in the
    order of ids.
    """
    rows = dense(input, "[top_k] input")
    if rows.ndim != 2 or not 1 <= k <= rows.shape[1]:
        raise InvalidArgumentError(
            f"[top_k] k: expected a number in [1, n] and input [batch, n], got {k} and "
            f"shape {rows.shape}"
        )
    values, memory = empty(input, (rows.shape[0], k))
    if _large("top_k", tie_break):
        # Ties go to the lower id: of mirrored rows, that is the higher one.
        mirrored = np.array(rows[:, ::-1], rows.dtype, order="C")
        ids = rows.shape[1] - 1 - _core.top_k(mirrored, k, sorted, memory, pool=pool)
        if not sorted:
            memory[...] = memory[:, ::-1].copy()
            ids = np.ascontiguousarray(ids[:, ::-1])
    else:
        ids = _core.top_k(rows, k, sorted, memory, pool=pool)
    return values, as_kind(ids, input)


def top_k_page_table_transform(
    input: Any,
    src_page_table: Any,
    lengths: Any,
    k: int,
    row_to_batch: Any = None,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: Any = None,
    page_table_row_starts: Any = None,
    *,
    page_size: int = 1,
    out: Any = None,
    out_raw_indices: Any = None,
    pool: ThreadPool | None = None,
) -> Any:
    """The slots of the k highest scores of each row, int32 [batch, k]: what attention over chosen
    tokens of a paged cache reads.

    Score i of a row's window has the slot page * page_size + i % page_size, where page is
    src_page_table[b, first + i // page_size].

    Args:
        src_page_table: int32 [sequences, pages].
        lengths: int32 [batch]: scores of each row; fewer than k give all, and -1 behind them.
        row_to_batch: int32 [batch], the sequence b of each row; default: its own number.
        row_starts: int32 [batch], where the window of a row begins; default 0.
        page_table_row_starts: int32 [batch], `first`; default: row_starts, which with a page_size
            above 1 must be said.
        page_size: a power of two.
        out: int32 [batch, k], C-contiguous: where the result goes; out_raw_indices: the same for i.
    """
    op = "top_k_page_table_transform"
    ids = _window_ids(op, input, lengths, k, tie_break, row_starts, pool)
    table = dense(src_page_table, f"[{op}] src_page_table")
    got = f"{dtype_name(table.dtype)} {table.shape}"
    expect(table.ndim == 2 and table.dtype == np.int32, f"[{op}] src_page_table", "int32 2D", got)
    power = 0 < page_size <= 1 << 30 and page_size & (page_size - 1) == 0
    expect(power, f"[{op}] page_size", "a power of two up to 2^30", page_size)
    first = page_table_row_starts
    if first is None:
        ok = page_size == 1 or row_starts is None
        expect(ok, f"[{op}] page_table_row_starts", "an array with row_starts and pages", None)
        first = row_starts
    count = ids.shape[0]
    firsts = _of_rows(op, "page_table_row_starts", first, count, np.zeros(count, np.int32))
    batches = _of_rows(op, "row_to_batch", row_to_batch, count, np.arange(count, dtype=np.int32))
    ok = not count or 0 <= int(batches.min()) <= int(batches.max()) < table.shape[0]
    expect(ok, f"[{op}] row_to_batch", f"numbers below {table.shape[0]}, the sequences", "others")
    chosen = ids >= 0
    entries = np.where(chosen, firsts[:, None] + ids // page_size, 0)
    ok = not chosen.any() or (entries.min() >= 0 and entries.max() < table.shape[1])
    expect(bool(ok), f"[{op}] src_page_table", f"{int(entries.max(initial=0)) + 1} pages", got)
    slots = np.full(ids.shape, -1, np.int64)
    rows = np.broadcast_to(batches[:, None], ids.shape)
    pages = table[rows[chosen], entries[chosen]].astype(np.int64)
    slots[chosen] = pages * page_size + ids[chosen] % page_size
    fits = bool((pages >= 0).all()) and int(slots.max(initial=0)) < 2**31
    expect(fits, f"[{op}] src_page_table", "pages whose slots fit int32", "others")
    given, memory = result(input, ids.shape, np.int32, out, f"[{op}] out")
    memory[...] = slots
    if out_raw_indices is not None:
        raw = result(input, ids.shape, np.int32, out_raw_indices, f"[{op}] out_raw_indices")
        raw[1][...] = ids
    return given


def top_k_ragged_transform(
    input: Any,
    offsets: Any,
    lengths: Any,
    k: int,
    deterministic: bool = False,
    tie_break: int = TopKTieBreak.NONE,
    dsa_graph_safe: bool = False,
    row_starts: Any = None,
    *,
    pool: ThreadPool | None = None,
) -> Any:
    """The ids of the k highest scores of each row in its window, plus its offset: int32 [batch, k],
    -1 behind the last. `offsets` int32 [batch]; the others as of `top_k_page_table_transform`."""
    op = "top_k_ragged_transform"
    ids = _window_ids(op, input, lengths, k, tie_break, row_starts, pool)
    count = ids.shape[0]
    added = _of_rows(op, "offsets", offsets, count, np.zeros(count, np.int32))
    moved = np.where(ids >= 0, ids + added[:, None], -1)
    expect(int(moved.max(initial=0)) < 2**31, f"[{op}] offsets", "ids that fit int32", "others")
    given, memory = result(input, ids.shape, np.int32, None, f"[{op}] out")
    memory[...] = moved
    return given


def _large(op: str, tie_break: int) -> bool:
    ok = tie_break in tuple(TopKTieBreak)
    expect(ok, f"[{op}] tie_break", "a TopKTieBreak, 0 to 2", tie_break)
    return tie_break == TopKTieBreak.LARGE


def _of_rows(op: str, name: str, x: Any, count: int, default: Indices) -> Indices:
    if x is None:
        return default
    values = indices(x, f"[{op}] {name}")
    expect(values.size == count, f"[{op}] {name}", f"{count} values", values.size)
    return values


def _window_ids(
    op: str,
    input: Any,
    lengths: Any,
    k: int,
    tie_break: int,
    row_starts: Any,
    pool: ThreadPool | None,
) -> Ids:
    """[batch, k]: where the k highest scores are in each row's window, ascending, then -1."""
    rows = view(input, f"[{op}] input")
    expect(rows.ndim == 2, f"[{op}] input", "2 dimensions", f"shape {rows.shape}")
    name = dtype_name(rows.dtype)
    expect(name in _TYPES, f"[{op}] input", " or ".join(_TYPES), name)
    expect(k >= 1, f"[{op}] k", "a positive number", k)
    count, width = rows.shape
    none = np.zeros(count, np.int32)
    sizes = _of_rows(op, "lengths", lengths, count, none)
    starts = _of_rows(op, "row_starts", row_starts, count, none)
    ok = bool(((sizes >= 0) & (starts >= 0) & (starts.astype(np.int64) + sizes <= width)).all())
    expect(ok, f"[{op}] lengths", f"windows within the {width} scores of a row", "others")
    large = _large(op, tie_break)
    longest = int(sizes.max(initial=0))
    chosen = min(k, longest)
    found = np.full((count, k), -1, np.int64)
    if chosen == 0:
        return found
    scores = _windows(rows, starts, sizes, longest, large)
    # Padding is lower than any score, or comes after the scores that equal it.
    ids = _core.top_k(scores, chosen, False, np.empty((count, chosen), scores.dtype), pool=pool)
    if large:
        ids = sizes[:, None] - 1 - ids
        ids = np.sort(np.where(ids < 0, longest, ids), axis=1)
    found[:, :chosen] = np.where(ids < sizes[:, None], ids, -1)
    return found


def _windows(rows: Array, starts: Indices, sizes: Indices, longest: int, mirrored: bool) -> Array:
    """The windows [batch, longest] from the left, mirrored or not, with -infinity behind them."""
    if not mirrored and not starts.any() and bool((sizes == longest).all()):
        return dense(rows[:, :longest], "[top_k] input")
    bits = rows.view(np.uint16) if dtype_name(rows.dtype) == "bfloat16" else rows
    column = np.arange(longest)
    places = starts[:, None] + (sizes[:, None] - 1 - column if mirrored else column)
    windows = np.take_along_axis(bits, np.clip(places, 0, rows.shape[1] - 1), axis=1)
    padding = column >= sizes[:, None]
    windows[padding] = _LOWEST_BF16 if bits is not rows else -np.inf
    return windows if bits is rows else windows.view(bfloat16)

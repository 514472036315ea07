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
from effinfer._core import InvalidArgumentError, Queue, ThreadPool
from effinfer.ops.shared.arrays import dense, dtype_name, result, view
from effinfer.ops.shared.options import Indices, expect, indices
from effinfer.ops.shared.places import DevicePlace, place_of
from effinfer.ops.shared.windows import chosen_there, windows

Ids = npt.NDArray[np.int64]

_TYPES = ("float32", "float16", "bfloat16")


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
    pool: ThreadPool | Queue | None = None,
) -> tuple[Any, Any]:
    """The k highest values of each row of input [batch, n], and their ids, int64 [batch, k].

    Highest first when `sorted`, and among equals the one that `tie_break` prefers; else in the
    order of ids. On a GPU at most 4096 are sorted, and results of rows with NaN mean nothing.
    """
    at = place_of(input, pool, "[top_k] input")
    rows = at.dense(input, "[top_k] input")
    if rows.ndim != 2 or not 1 <= k <= rows.shape[1]:
        raise InvalidArgumentError(
            f"[top_k] k: expected a number in [1, n] and input [batch, n], got {k} and "
            f"shape {rows.shape}"
        )
    large = _large("top_k", tie_break)
    values, memory = at.empty(input, (rows.shape[0], k))
    ids, places = at.empty(input, (rows.shape[0], k), np.int64)
    if not large:
        _core.top_k(rows, k, sorted, memory, places, pool=at.executor)
        return values, ids
    # Ties go to the lower id: of mirrored rows, that is the higher one.
    if at.on_gpu:
        turned = at.temporary(rows.shape, np.float32)
        _core.window_rows("top_k", rows, None, None, True, turned, at.executor)
        chosen = at.temporary((rows.shape[0], k), np.float32)
        _core.top_k(turned, k, sorted, chosen, places, pool=at.executor)
        _core.unmirror_chosen(rows, sorted, places, memory, at.executor)
        return values, ids
    mirrored = np.array(rows[:, ::-1], rows.dtype, order="C")
    _core.top_k(mirrored, k, sorted, memory, places, pool=at.executor)
    places[...] = rows.shape[1] - 1 - places
    if not sorted:
        memory[...] = memory[:, ::-1].copy()
        places[...] = places[:, ::-1].copy()
    return values, ids


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
    pool: ThreadPool | Queue | None = None,
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
    at = place_of(input, pool, f"[{op}] input")
    power = 0 < page_size <= 1 << 30 and page_size & (page_size - 1) == 0
    expect(power, f"[{op}] page_size", "a power of two up to 2^30", page_size)
    first = page_table_row_starts
    if first is None:
        ok = page_size == 1 or row_starts is None
        expect(ok, f"[{op}] page_table_row_starts", "an array with row_starts and pages", None)
        first = row_starts
    if isinstance(at, DevicePlace):
        places = {
            "table": at.dense(src_page_table, f"[{op}] src_page_table"),
            "row_to_batch": at.optional(row_to_batch, f"[{op}] row_to_batch"),
            "first": at.optional(first, f"[{op}] page_table_row_starts"),
        }
        results = {"out": out, "raw": out_raw_indices}
        large = _large(op, tie_break)
        return chosen_there(
            op, at, input, lengths, k, large, row_starts, results, places, page_size
        )
    ids = _window_ids(op, input, lengths, k, tie_break, row_starts, at.executor)
    table = dense(src_page_table, f"[{op}] src_page_table")
    got = f"{dtype_name(table.dtype)} {table.shape}"
    expect(table.ndim == 2 and table.dtype == np.int32, f"[{op}] src_page_table", "int32 2D", got)
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
    pool: ThreadPool | Queue | None = None,
) -> Any:
    """The ids of the k highest scores of each row in its window, plus its offset: int32 [batch, k],
    -1 behind the last. `offsets` int32 [batch]; the others as of `top_k_page_table_transform`."""
    op = "top_k_ragged_transform"
    at = place_of(input, pool, f"[{op}] input")
    if isinstance(at, DevicePlace):
        places = {"offsets": at.optional(offsets, f"[{op}] offsets")}
        return chosen_there(
            op, at, input, lengths, k, _large(op, tie_break), row_starts, {}, places
        )
    ids = _window_ids(op, input, lengths, k, tie_break, row_starts, at.executor)
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
    scores = windows(rows, starts, sizes, longest, large)
    # Padding is lower than any score, or comes after the scores that equal it.
    ids = np.empty((count, chosen), np.int64)
    _core.top_k(scores, chosen, False, np.empty((count, chosen), scores.dtype), ids, pool=pool)
    if large:
        ids = sizes[:, None] - 1 - ids
        ids = np.sort(np.where(ids < 0, longest, ids), axis=1)
    found[:, :chosen] = np.where(ids < sizes[:, None], ids, -1)
    return found

"""Windows of rows for top-k, of the CPU and of a GPU."""

from typing import Any

import numpy as np

from effinfer import _core
from effinfer.ops.shared.arrays import Array, bfloat16, dense, dtype_name
from effinfer.ops.shared.options import Indices, expect
from effinfer.ops.shared.places import AnyView, DevicePlace

# The bits of bfloat16's negative infinity.
_LOWEST_BF16 = np.uint16(0xFF80)


def windows(rows: Array, starts: Indices, sizes: Indices, longest: int, mirrored: bool) -> Array:
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


def chosen_there(
    op: str,
    at: DevicePlace,
    input: Any,
    lengths: Any,
    k: int,
    large: bool,
    row_starts: Any,
    results: dict[str, Any],
    places: dict[str, AnyView | None],
    page_size: int = 1,
) -> Any:
    """The transforms on a GPU, int32 [batch, k], where nobody looks at lists."""
    rows = at.view(input, f"[{op}] input")
    expect(rows.ndim == 2, f"[{op}] input", "2 dimensions", f"shape {rows.shape}")
    expect(k >= 1, f"[{op}] k", "a positive number", k)
    spans = at.optional(lengths, f"[{op}] lengths"), at.optional(row_starts, f"[{op}] row_starts")
    shape = (rows.shape[0], k)
    given, memory = at.result(input, shape, np.int32, results.get("out"), f"[{op}] out")
    raw = results.get("raw")
    if raw is not None:
        raw = at.result(input, shape, np.int32, raw, f"[{op}] out_raw_indices")[1]
    width = rows.shape[1]
    scores = at.temporary(rows.shape, np.float32)
    _core.window_rows(op, rows, *spans, large, scores, at.executor)
    chosen = (rows.shape[0], min(k, width))
    ids = at.temporary(chosen, np.int64)
    if width > 0:
        values = at.temporary(chosen, np.float32)
        _core.top_k(scores, chosen[1], False, values, ids, pool=at.executor)
    tables: dict[str, Any] = {"page_size": page_size, **places}
    _core.place_chosen(op, ids, width, *spans, large, memory, raw, **tables, pool=at.executor)
    return given

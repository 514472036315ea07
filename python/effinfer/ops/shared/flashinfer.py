"""What FlashInfer's arguments of plan() and run() mean here: which ones say again what the lists
say, and are held to it, which ones hold in any case, and which ones are refused.

    fixed_split_size, disable_split_kv  ask for results that do not depend on the batch: attention
                                        folds its keys at fixed places, so results never do
    seq_lens, seq_lens_q, block_tables, max_token_per_sequence, max_sequence_kv, uniform_q_len
                                        must agree with the lists
    o_data_type                         must be the type of the queries
    enable_pdl                          has no effect
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from effinfer.ops.shared.arrays import Array, as_kind, dense, dtype_name, view, writable
from effinfer.ops.shared.options import data_type_name, expect, one_of, unsupported
from effinfer.ops.shared.places import to_host
from effinfer.ops.shared.planned import PlannedAttention
from effinfer.ops.shared.sequences import Sequences

LSE_LAYOUTS = ("NH", "HN")


def integers(x: Any, argument: str) -> npt.NDArray[np.int64]:
    """A vector of integers of any width and sign."""
    array = dense(x, argument)
    ok = array.dtype.kind in "iu" and not array.dtype.metadata
    expect(ok, argument, "integers", dtype_name(array.dtype))
    expect(array.ndim == 1, argument, "1 dimension", f"shape {array.shape}")
    return array.astype(np.int64)


def check_splits(op: str, fixed_split_size: Any, disable_split_kv: Any) -> None:
    argument = f"[{op}] fixed_split_size"
    ok = fixed_split_size is None or (isinstance(fixed_split_size, int) and fixed_split_size > 0)
    expect(ok, argument, "a positive number of pages or None", fixed_split_size)
    ok = isinstance(disable_split_kv, (bool, np.bool_))
    expect(ok, f"[{op}] disable_split_kv", "a bool", disable_split_kv)


def query_type(op: str, q_data_type: Any, o_data_type: Any) -> Any:
    """The type of queries and results, from either or None."""
    queries, results = data_type_name(q_data_type), data_type_name(o_data_type)
    ok = results is None or queries in (None, results)
    expect(ok, f"[{op}] o_data_type", f"{queries}, the type of q", results)
    return results if q_data_type is None else q_data_type


def check_agreement(
    op: str,
    sequences: Sequences,
    *,
    seq_lens: Any = None,
    seq_lens_q: Any = None,
    block_tables: Any = None,
    max_token_per_sequence: int | None = None,
    max_sequence_kv: int | None = None,
    uniform_q_len: int | None = None,
) -> None:
    """Asserts that arguments which repeat the lists agree with them."""
    rows = np.diff(sequences.qo_indptr)
    for name, given, meant in (
        ("seq_lens", seq_lens, sequences.kv_len),
        ("seq_lens_q", seq_lens_q, rows),
    ):
        if given is not None:
            lengths = integers(np.reshape(to_host(given, f"[{op}] {name}"), -1), f"[{op}] {name}")
            ok = np.array_equal(lengths, meant)
            expect(ok, f"[{op}] {name}", "the lengths of the lists", "others")
    for name, limit, counts in (
        ("max_token_per_sequence", max_token_per_sequence, rows),
        ("max_sequence_kv", max_sequence_kv, sequences.kv_len),
    ):
        longest = int(counts.max(initial=0))
        ok = limit is None or limit >= longest
        expect(ok, f"[{op}] {name}", f"{longest} or more, as in the lists", limit)
    if uniform_q_len:
        ok = bool((rows == uniform_q_len).all())
        expect(ok, f"[{op}] uniform_q_len", "the query rows of every sequence", uniform_q_len)
    if block_tables is not None:
        _check_block_tables(f"[{op}] block_tables", to_host(block_tables, op), sequences)


def _check_block_tables(argument: str, tables: Array, sequences: Sequences) -> None:
    counts = np.diff(sequences.kv_indptr)
    longest = int(counts.max(initial=0))
    ok = tables.ndim == 2 and tables.shape[0] == counts.size and tables.shape[1] >= longest
    expect(ok, argument, f"shape [{counts.size}, {longest} or more]", tables.shape)
    listed = np.arange(tables.shape[1])[None] < counts[:, None]
    pages = sequences.kv_indices
    ok = pages is not None and np.array_equal(tables[listed], pages[: sequences.kv_indptr[-1]])
    expect(ok, argument, "the pages of the lists", "others")


def run_planned(
    planned: PlannedAttention,
    q: Any,
    k: Any,
    v: Any,
    *,
    q_scale: Any = None,
    lse: Any = None,
    return_lse: bool = False,
    lse_layout: str = "NH",
    window_left: int | None = None,
    enable_pdl: bool | None = None,
    o_scale: Any = None,
    kv_cache_sf: Any = None,
    skip_softmax_threshold_scale_factor: float | None = None,
    use_fp16_softmax: bool | None = None,
    uses_spcompress: bool | None = None,
    **options: Any,
) -> Any:
    """`PlannedAttention.run` with FlashInfer's arguments of run().

    `window_left` is that of the plan; `lse_layout` "HN" is [num_qo_heads, T].
    """
    op = planned.op
    unsupported(
        op,
        o_scale=o_scale,
        kv_cache_sf=kv_cache_sf,
        skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
        use_fp16_softmax=use_fp16_softmax,
        uses_spcompress=uses_spcompress,
    )
    planned_window = planned.window_left
    ok = window_left in (None, planned_window)
    expect(ok, f"[{op}] window_left", f"{planned_window}, the plan's", window_left)
    one_of(lse_layout, LSE_LAYOUTS, f"[{op}] lse_layout")
    options["q_scale"] = _number(q_scale, f"[{op}] q_scale")
    if not return_lse or lse_layout == "NH":
        return planned.run(q, k, v, lse=lse, return_lse=return_lse, **options)
    out, sums = planned.run(q, k, v, return_lse=True, **options)
    rows = view(sums, f"[{op}] lse")
    if lse is None:
        return out, as_kind(np.ascontiguousarray(rows.T), q)
    target = writable(lse, f"[{op}] lse")
    ok = target.shape == rows.shape[::-1] and target.dtype == np.float32
    expect(ok, f"[{op}] lse", f"float32 {rows.shape[::-1]}", f"{target.dtype} {target.shape}")
    target[...] = rows.T
    return out, lse


def _number(x: Any, argument: str) -> float | None:
    if x is None or isinstance(x, (int, float)):
        return x
    scale = view(x, argument)
    ok = scale.size == 1 and scale.dtype.kind == "f"
    expect(ok, argument, "a number", f"{dtype_name(scale.dtype)} {scale.shape}")
    return float(scale.reshape(-1)[0])

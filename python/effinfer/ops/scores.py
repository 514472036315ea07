"""How much attention keys get, without the matrix of probabilities: what methods that evict,
compress or select keys look at."""

from typing import Any

import numpy as np

from effinfer import _core
from effinfer._core import Queue, ThreadPool
from effinfer.ops.shared.key_batch import KeyBatch
from effinfer.ops.shared.options import expect, number_or_array, one_of
from effinfer.ops.shared.places import HOST, AnyView, Place, place_of


def attention_scores(
    q: Any,
    k: Any,
    *,
    causal: bool = True,
    sm_scale: float | None = None,
    reduce: str = "sum",
    lse: Any = None,
    lse_base: str = "log2",
    diagonals: bool = False,
    positions: Any = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    k_scale: Any = None,
    qo_indptr: Any = None,
    kv_indptr: Any = None,
    kv_indices: Any = None,
    kv_len: Any = None,
    kv_layout: str = "NHD",
    out: Any = None,
    pool: ThreadPool | Queue | None = None,
) -> Any:
    """For each query head and key the sum, or the maximum, over the query rows of softmax(q k).

    Sums over all rows are what H2O accumulates (arXiv:2306.14048, section 4), those of the last
    rows what SnapKV (arXiv:2404.14469, section 3) and MInference (arXiv:2407.02490, section 3) look
    at, those of sampled rows SampleAttention's (arXiv:2406.15486, section 4); maxima tell whether a
    key ever mattered (Scissorhands, arXiv:2305.17118).

    Args:
        q, k: queries and keys with their index vectors as `KeyBatch` describes them.
        lse: float32 [T, num_qo_heads]: the logarithm of each row's sum of exponentials, where an
            attention call has returned it; default: computed first, which is half of the work.
        diagonals: also the sums by distance from a row back to its key; needs causal, "sum" and at
            most 128 rows a sequence.
        positions: int32 [T]: where the rows are in their sequences, if not at the end.
        window_left: keys farther back than this are hidden; -1: none.
        k_scale: a number, or float32 of k's shape without head_dim, that numbers of k are times.

    Returns:
        float32 [num_qo_heads, sum of kv_len], the keys of one sequence after the other; with
        diagonals a pair with the same of distances: [h, start + d] adds up the probabilities of
        keys d places before the row.
    """
    op = "attention_scores"
    at = place_of(q, pool, f"[{op}] q")
    batch = KeyBatch.of(
        op,
        q,
        k,
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        kv_len=kv_len,
        kv_layout=kv_layout,
        at=at,
    )
    shape = (batch.num_qo_heads, int(batch.kv_len.sum()))
    given, given_view = at.result(q, shape, np.float32, out, f"[{op}] out")
    sums, sums_view = at.empty(q, shape, np.float32) if diagonals else (None, None)
    scores_into(
        batch,
        given_view,
        sums_view,
        causal=causal,
        sm_scale=sm_scale,
        reduce=reduce,
        positions=at.optional(positions, f"[{op}] positions"),
        window_left=window_left,
        logits_soft_cap=logits_soft_cap or 0.0,
        lse=at.optional(lse, f"[{op}] lse"),
        lse_base=lse_base,
        k_scale=k_scale,
        at=at,
        pool=at.executor,
    )
    return (given, sums) if diagonals else given


def scores_into(
    batch: KeyBatch,
    out: AnyView,
    diagonals: AnyView | None,
    *,
    at: Place = HOST,
    sm_scale: float | None = None,
    k_scale: Any = None,
    **options: Any,
) -> None:
    """`attention_scores` of checked arrays."""
    options |= batch.geometry
    _core.attention_scores(
        batch.q,
        batch.k,
        batch.qo_indptr,
        batch.kv_indptr,
        batch.kv_indices,
        batch.kv_len,
        out,
        diagonals,
        sm_scale=batch.scale(sm_scale),
        k_scale=number_or_array(k_scale, "[attention_scores] k_scale", at),
        kv_layout=batch.kv_layout,
        **options,
    )


def pooled_attention_scores(
    q: Any,
    k: Any,
    *,
    block_size: int = 1,
    block_reduce: str = "sum",
    kernel_size: int = 1,
    pooling: str = "avg",
    group_heads: bool = False,
    kv_indptr: Any = None,
    kv_len: Any = None,
    pool: ThreadPool | Queue | None = None,
    **options: Any,
) -> Any:
    """`attention_scores`, with neighbours pooled.

    In this order: the query heads of each KV head are added up (`group_heads`), each score becomes
    the "max" or the "avg" of the `kernel_size` (odd) around it in its sequence, zeros outside
    counted (SnapKV, arXiv:2404.14469, section 4), and those of every `block_size` keys of a
    sequence are reduced by "sum", "mean" or "max".

    Args:
        options: more arguments of `attention_scores`; no `diagonals`, no `out`.

    Returns:
        float32 [num_qo_heads, or num_kv_heads with group_heads; sum of ceil(kv_len / block_size)].
    """
    op = "pooled_attention_scores"
    one_of(pooling, ("avg", "max"), f"[{op}] pooling")
    for name in ("diagonals", "out"):
        expect(not options.get(name), f"[{op}] {name}", "not given", options.get(name))
    scores = attention_scores(q, k, kv_indptr=kv_indptr, kv_len=kv_len, pool=pool, **options)
    layout = {"kv_indices": options.get("kv_indices"), "kv_layout": options.get("kv_layout", "NHD")}
    at = place_of(q, pool, f"[{op}] q")
    lists = {"qo_indptr": options.get("qo_indptr"), "kv_indptr": kv_indptr, "kv_len": kv_len}
    batch = KeyBatch.of(op, q, k, **lists, **layout, at=at)
    expect(block_size > 0, f"[{op}] block_size", "a number > 0", block_size)
    heads = batch.num_kv_heads if group_heads else batch.num_qo_heads
    shape = (heads, int((-(-batch.kv_len.astype(np.int64) // block_size)).sum()))
    pooled, memory = at.empty(q, shape, np.float32)
    _core.pool_scores(
        at.dense(scores, f"[{op}] scores"),
        batch.kv_len,
        memory,
        pooling=pooling,
        kernel_size=kernel_size,
        block_reduce=block_reduce,
        block_size=block_size,
        group=batch.num_qo_heads // batch.num_kv_heads if group_heads else 1,
        pool=at.executor,
    )
    return pooled

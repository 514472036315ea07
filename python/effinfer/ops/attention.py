"""Paged attention, and writing keys and values to the pages.

The sequences of a call are described as in FlashInfer, all int32. Sequence s owns the query rows
`qo_indptr[s]:qo_indptr[s + 1]`, which are its last tokens; its tokens lie in the pages
`kv_indices[kv_indptr[s]:kv_indptr[s + 1]]`, 64 a page; `kv_len[s]` counts them, those rows
included. A row's result is the same bits for any batch, any division of a prompt into steps and any
number of threads.
"""

from typing import Any

from effinfer import _core
from effinfer._core import PagedKv, ThreadPool, Visits
from effinfer.ops.shared.arrays import AnyArray, Array, ArrayT, as_kind, dense, optional


def kv_append(
    kv: PagedKv,
    k: AnyArray,
    v: AnyArray,
    qo_indptr: AnyArray,
    kv_indptr: AnyArray,
    kv_indices: AnyArray,
    kv_len: AnyArray,
    *,
    pool: ThreadPool | None = None,
) -> None:
    """Writes k and v [T, num_kv_heads, head_dim] to the places of the rows.

    Rows of different sequences must not fall on the same place.
    """
    layout = layout_of("kv_append", qo_indptr, kv_indptr, kv_indices, kv_len)
    _core.kv_append(kv, dense(k, "[kv_append] k"), dense(v, "[kv_append] v"), *layout, pool=pool)


def rope_append(
    kv: PagedKv,
    q: ArrayT,
    k: AnyArray,
    v: AnyArray,
    table: AnyArray,
    qo_indptr: AnyArray,
    kv_indptr: AnyArray,
    kv_indices: AnyArray,
    kv_len: AnyArray,
    *,
    q_norm: AnyArray | None = None,
    k_norm: AnyArray | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    pool: ThreadPool | None = None,
) -> ArrayT:
    """`kv_append` after an RMS norm and a rotation of the keys; returns q treated likewise.

    Args:
        q: [T, num_qo_heads, head_dim].
        k, v: [T, num_kv_heads, head_dim].
        table: [T, 2, dims / 2], of `rope_table`.
        q_norm, k_norm: [head_dim], weights of an RMS norm of each head; None: no norm.
        interleaved: pairs (2i, 2i + 1), else (i, i + dims / 2).

    The same bits as `rms_norm`, `rope` and `kv_append` one after the other.
    """
    layout = layout_of("rope_append", qo_indptr, kv_indptr, kv_indices, kv_len)
    rotated = _core.rope_append(
        kv,
        dense(q, "[rope_append] q"),
        dense(k, "[rope_append] k"),
        dense(v, "[rope_append] v"),
        dense(table, "[rope_append] table"),
        *layout,
        q_norm=optional(q_norm, "[rope_append] q_norm"),
        k_norm=optional(k_norm, "[rope_append] k_norm"),
        eps=eps,
        interleaved=interleaved,
        pool=pool,
    )
    return as_kind(rotated, q)


def paged_attention(
    q: ArrayT,
    kv: PagedKv,
    qo_indptr: AnyArray,
    kv_indptr: AnyArray,
    kv_indices: AnyArray,
    kv_len: AnyArray,
    *,
    sm_scale: float | None = None,
    window_left: int = -1,
    sink_tokens: int = 0,
    logits_soft_cap: float = 0.0,
    parents: AnyArray | None = None,
    arithmetic: str = "f32",
    visits: Visits | None = None,
    alibi_slopes: AnyArray | None = None,
    sink_logits: AnyArray | None = None,
    chunk: int = 0,
    q_before: ArrayT | None = None,
    q_far: ArrayT | None = None,
    return_lse: bool = False,
    lse_base: str = "log2",
    pool: ThreadPool | None = None,
) -> Any:
    """Causal attention of q [T, num_qo_heads, head_dim] over the pages (arXiv:1805.02867 over fixed
    chunks of keys).

    Args:
        sm_scale: of the scores; default 1 / sqrt(head_dim).
        window_left: a row at position p sees keys in [p - window_left, p]; -1: all.
        sink_tokens: with a window, so many first keys are seen too (StreamingLLM,
            arXiv:2309.17453).
        logits_soft_cap: scores become cap * tanh(score / cap); 0: none.
        parents: int32 [T]; the rows of each sequence, 64 at most, are a tree of drafts (SpecInfer,
            arXiv:2305.09781). A row's parent is the number, within its sequence, of an earlier
            row, or -1. A row sees what precedes the step, its ancestors and itself; windows,
            sinks and slopes count its depth and not its row.
        arithmetic: "f32", or "bf16": queries and probabilities are rounded to bfloat16 and
            multiplied as such with bf16 pages, twice as fast where `effinfer info` names vectors
            or tiles for bfloat16; UnsupportedError where the CPU has no AVX512-BF16.
        visits: which keys blocks of rows visit (`effinfer.ops.visits`), of this batch; None: all.
            Without a window and parents.
        alibi_slopes: float32 [num_qo_heads]: + slope * (key - query position).
        sink_logits: float32 [num_qo_heads]: the logit of one more key, whose value is zero.
        chunk, q_before, q_far: dual chunk attention (An et al., arXiv:2402.17463). Keys are in
            chunks of so many tokens, a multiple of 256, by their places in the sequence: a row
            multiplies those of its own chunk with q, those of the one before it with q_before
            and older ones with q_far, arrays like q. 0: all with q.

    num_qo_heads is a multiple of num_kv_heads.

    Returns:
        As q; with return_lse a pair with float32 [T, num_qo_heads], the logarithm, to base 2 or
        ("ln") natural, of each row's sum of exponentials.
    """
    attended = _core.paged_attention(
        *rows_over("paged_attention", q, kv, qo_indptr, kv_indptr, kv_indices, kv_len),
        sm_scale=sm_scale,
        window_left=window_left,
        sink_tokens=sink_tokens,
        logits_soft_cap=logits_soft_cap,
        parents=optional(parents, "[paged_attention] parents"),
        arithmetic=arithmetic,
        visits=visits,
        alibi_slopes=optional(alibi_slopes, "[paged_attention] alibi_slopes"),
        sink_logits=optional(sink_logits, "[paged_attention] sink_logits"),
        chunk=chunk,
        q_before=optional(q_before, "[paged_attention] q_before"),
        q_far=optional(q_far, "[paged_attention] q_far"),
        return_lse=return_lse,
        lse_base=lse_base,
        pool=pool,
    )
    if return_lse:
        return as_kind(attended[0], q), as_kind(attended[1], q)
    return as_kind(attended, q)


def layout_of(op: str, *indices: Any) -> tuple[Array, Array, Array, Array]:
    """The index vectors of a batch, checked for contiguity."""
    names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_len")
    qo_indptr, kv_indptr, kv_indices, kv_len = (
        dense(array, f"[{op}] {name}") for array, name in zip(indices, names, strict=True)
    )
    return qo_indptr, kv_indptr, kv_indices, kv_len


def rows_over(
    op: str, q: AnyArray, kv: PagedKv, *indices: Any
) -> tuple[Array, PagedKv, Array, Array, Array, Array]:
    """Query rows and the pages that they lie over, checked alike."""
    return dense(q, f"[{op}] q"), kv, *layout_of(op, *indices)

"""Paged attention, and writing keys and values to the pages.

The sequences of a call are described as in FlashInfer, all int32. Sequence s owns the query rows
`qo_indptr[s]:qo_indptr[s + 1]`, which are its last tokens; its tokens lie in the pages
`kv_indices[kv_indptr[s]:kv_indptr[s + 1]]`, 64 a page; `kv_len[s]` counts them, those rows
included. A row's result is the same bits for any batch, any division of a prompt into steps and any
number of threads.
"""

from effinfer import _core
from effinfer._core import PagedKv, ThreadPool
from effinfer.ops.arrays import Array, Floats, dense, optional


def kv_append(
    kv: PagedKv,
    k: Array,
    v: Array,
    qo_indptr: Array,
    kv_indptr: Array,
    kv_indices: Array,
    kv_len: Array,
    *,
    pool: ThreadPool | None = None,
) -> None:
    """Writes k and v [T, num_kv_heads, head_dim] to the places of the rows.

    Rows of different sequences must not fall on the same place.
    """
    layout = (dense(qo_indptr), dense(kv_indptr), dense(kv_indices), dense(kv_len))
    _core.kv_append(kv, dense(k), dense(v), *layout, pool=pool)


def rope_append(
    kv: PagedKv,
    q: Array,
    k: Array,
    v: Array,
    table: Array,
    qo_indptr: Array,
    kv_indptr: Array,
    kv_indices: Array,
    kv_len: Array,
    *,
    q_norm: Array | None = None,
    k_norm: Array | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    pool: ThreadPool | None = None,
) -> Floats:
    """`kv_append` after an RMS norm and a rotation of the keys; returns q treated likewise.

    Args:
        q: [T, num_qo_heads, head_dim].
        k, v: [T, num_kv_heads, head_dim].
        table: [T, 2, dims / 2], of `rope_table`.
        q_norm, k_norm: [head_dim], weights of an RMS norm of each head; None: no norm.
        interleaved: pairs (2i, 2i + 1), else (i, i + dims / 2).

    The same bits as `rms_norm`, `rope` and `kv_append` one after the other.
    """
    layout = (dense(qo_indptr), dense(kv_indptr), dense(kv_indices), dense(kv_len))
    return _core.rope_append(
        kv,
        dense(q),
        dense(k),
        dense(v),
        dense(table),
        *layout,
        q_norm=optional(q_norm),
        k_norm=optional(k_norm),
        eps=eps,
        interleaved=interleaved,
        pool=pool,
    )


def paged_attention(
    q: Array,
    kv: PagedKv,
    qo_indptr: Array,
    kv_indptr: Array,
    kv_indices: Array,
    kv_len: Array,
    *,
    scale: float | None = None,
    window_left: int = -1,
    sinks: int = 0,
    soft_cap: float = 0.0,
    parents: Array | None = None,
    arithmetic: str = "f32",
    pool: ThreadPool | None = None,
) -> Floats:
    """Causal attention of q [T, num_qo_heads, head_dim] over the pages (arXiv:1805.02867 over fixed
    chunks of keys).

    Args:
        scale: of the scores; default 1 / sqrt(head_dim).
        window_left: a row at position p sees keys in [p - window_left, p]; -1: all.
        sinks: with a window, the first `sinks` keys are seen too (StreamingLLM, arXiv:2309.17453).
        soft_cap: scores become cap * tanh(score / cap); 0: none.
        parents: int32 [T]; the rows of each sequence, 64 at most, are a tree of drafts (SpecInfer,
            arXiv:2305.09781). A row's parent is the number, within its sequence, of an earlier
            row, or -1. A row sees what precedes the step, its ancestors and itself; windows count
            its depth and not its row.
        arithmetic: "f32", or "bf16": queries and probabilities are rounded to bfloat16 and
            multiplied as such with bf16 pages, twice as fast where the CPU has AVX512-BF16;
            UnsupportedError elsewhere.

    num_qo_heads is a multiple of num_kv_heads.
    """
    layout = (dense(qo_indptr), dense(kv_indptr), dense(kv_indices), dense(kv_len))
    return _core.paged_attention(
        dense(q),
        kv,
        *layout,
        scale=scale,
        window_left=window_left,
        sinks=sinks,
        soft_cap=soft_cap,
        parents=optional(parents),
        arithmetic=arithmetic,
        pool=pool,
    )

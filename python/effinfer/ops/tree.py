"""Attention of a tree of drafts, for speculative decoding."""

from typing import Any

from effinfer import _core
from effinfer._core import PagedKv, Queue, ThreadPool
from effinfer.ops.shared.options import LAYOUTS, Scores, indices, kv_views, one_of
from effinfer.ops.shared.places import place_of
from effinfer.ops.shared.planned import PlannedAttention
from effinfer.ops.shared.sequences import Heads, Sequences


def tree_attention(
    q: Any,
    paged_kv_cache: Any,
    parents: Any,
    qo_indptr: Any,
    kv_indptr: Any,
    kv_indices: Any,
    kv_last_page_len: Any,
    *,
    kv_layout: str = "NHD",
    sm_scale: float | None = None,
    logits_soft_cap: float | None = None,
    return_lse: bool = False,
    lse_base: str = "log2",
    k_scale: Any = None,
    v_scale: Any = None,
    out: Any = None,
    lse: Any = None,
    pool: ThreadPool | Queue | None = None,
) -> Any:
    """Attention of the rows of trees of draft tokens (SpecInfer, arXiv:2305.09781), one tree a
    sequence: a row sees what precedes the tree, its ancestors and itself.

    Args:
        q: [T, num_qo_heads, head_dim].
        paged_kv_cache: as of `BatchPrefillWithPagedKVCacheWrapper.run`, with the keys of the drafts
            behind those of the sequence, in the order of the rows.
        parents: int32 [T]: the number, within its sequence, of a row's parent, an earlier row; -1
            for a row that follows the sequence.
        qo_indptr, kv_indptr, kv_indices, kv_last_page_len: rows and pages of the sequences, int32.

    Returns:
        [T, num_qo_heads, head_dim]; with return_lse a pair with float32 [T, num_qo_heads].
    """
    op = "tree_attention"
    one_of(kv_layout, LAYOUTS, f"[{op}] kv_layout")
    at = place_of(q, pool, f"[{op}] q")
    k, v = kv_views(op, paged_kv_cache, kv_layout, at=at)
    page_size, kv_heads, dim_qk, dim_vo = _sizes(k, v, kv_layout)
    names = ("kv_indptr", "kv_indices", "kv_last_page_len")
    lists = (qo_indptr, kv_indptr, kv_indices, kv_last_page_len)
    sequences = Sequences.paged(op, *lists, page_size, names)
    bits, bit_indptr = _core.ancestor_mask(
        indices(parents, f"[{op}] parents"), sequences.qo_indptr, sequences.kv_len
    )
    planned = PlannedAttention(
        op,
        sequences,
        Heads(int(q.shape[1]), kv_heads, dim_qk, dim_vo),
        Scores(sm_scale, logits_soft_cap),
        layout=kv_layout,
        mask=bits,
        mask_indptr=bit_indptr,
    )
    return planned.run(
        q,
        k,
        v,
        out=out,
        lse=lse,
        return_lse=return_lse,
        lse_base=lse_base,
        k_scale=k_scale,
        v_scale=v_scale,
        pool=pool,
    )


def _sizes(k: Any, v: Any, kv_layout: str) -> tuple[int, int, int, int]:
    """Tokens of a page, heads, and dimensions of keys and of values."""
    if isinstance(k, PagedKv):
        return k.page_size, k.num_kv_heads, k.head_dim, k.head_dim
    slots, heads = (1, 2) if kv_layout == "NHD" else (2, 1)
    return k.shape[slots], k.shape[heads], k.shape[3], v.shape[3]

"""Index lists of whole blocks and pages of keys; `index` describes lists."""

from functools import partial
from typing import Any

import numpy as np

from effinfer import _core
from effinfer._core import Queue, ThreadPool
from effinfer.ops.index import BlockIndex, block_index
from effinfer.ops.shared.key_batch import KeyBatch
from effinfer.ops.shared.options import (
    LAYOUTS,
    contiguous_rows,
    expect,
    indices,
    indptr,
    one_of,
    view_3d,
)
from effinfer.ops.shared.places import AnyView, HostPlace, Place, place_of, to_host


def block_score_index(
    q: Any,
    k: Any,
    *,
    num_blocks: int | None = None,
    mass: float | None = None,
    method: str = "mean",
    stride: int = 8,
    sink_tokens: int = 0,
    local_tokens: int = 0,
    block_size: int = 128,
    causal: bool = True,
    sm_scale: float | None = None,
    pool: ThreadPool | Queue | None = None,
    **keys: Any,
) -> BlockIndex:
    """Blocks of keys by scores of blocks, chosen for each head and block of rows.

    Args:
        num_blocks: the highest scores; or
        mass: as few of the highest as add up to this share of a row of scores.
        method: how blocks are scored. "mean": softmax of the products of mean queries and mean keys
            (MInference's block-sparse pattern, arXiv:2407.02490, section 3; FlexPrefill,
            arXiv:2502.20766, section 3). "antidiagonal": queries and keys of every `stride`
            positions are laid side by side, the queries in reverse, so that a product adds up an
            antidiagonal; softmax, and the sums of each block (XAttention, arXiv:2503.16428, section
            2.1).
        stride: divides block_size into a power of two.
        block_size: of queries and keys.
        keys: the index vectors of `KeyBatch`. The keys are float32, float16 or bfloat16.
    """
    op = "block_score_index"
    at = place_of(q, pool, f"[{op}] q")
    batch = KeyBatch.of(op, q, k, at=at, **keys)
    one = (num_blocks is None) != (mass is None)
    expect(one, f"[{op}] num_blocks", "either num_blocks or mass", "both" if mass else "none")
    expect(mass is None or 0 < mass <= 1, f"[{op}] mass", "more than 0, at most 1", mass)
    expect(num_blocks is None or num_blocks >= 0, f"[{op}] num_blocks", "0 or more", num_blocks)
    lists = _core.block_score_lists(
        batch.q,
        batch.arrays(op),
        *batch.lists,
        **batch.geometry,
        causal=causal,
        sm_scale=batch.scale(sm_scale),
        kv_layout=batch.kv_layout,
        block_size=block_size,
        sink_tokens=sink_tokens,
        local_tokens=local_tokens,
        method=method,
        stride=stride,
        num_blocks=num_blocks or 0,
        mass=mass or 0.0,
        pool=at.executor,
    )
    return block_index(lists, batch.qo_indptr, batch.kv_len, batch.heads, block_size, causal)


def page_bounds(
    k: Any,
    *,
    kv_indptr: Any = None,
    kv_indices: Any = None,
    kv_len: Any = None,
    page_size: int | None = None,
    kv_layout: str = "NHD",
    pool: ThreadPool | Queue | None = None,
) -> Any:
    """The least and the greatest of each page's keys, dimension by dimension (Quest,
    arXiv:2406.10774, section 3.3).

    Args:
        k: keys and their index vectors as `KeyBatch` describes them; float32, float16, bfloat16.
        page_size: of ragged keys: so many keys of a sequence count as a page.

    Returns:
        float32 [2, pages, num_kv_heads, head_dim]: by page id, zeros where no sequence has the
        page; of ragged keys one sequence after the other.
    """
    op = "page_bounds"
    at = place_of(k, pool, f"[{op}] k")
    argument = at.view(k, f"[{op}] k")
    ok = argument.ndim == (3 if kv_indices is None else 4)
    expect(ok, f"[{op}] k", "3 dimensions, or 4 with kv_indices", f"shape {argument.shape}")
    one_of(kv_layout, LAYOUTS, f"[{op}] kv_layout")
    heads = argument.shape[0 if argument.ndim == 3 and kv_layout == "HND" else -2]
    if argument.ndim == 4 and kv_layout == "HND":
        heads = argument.shape[1]
    queries = at.temporary((0, heads, argument.shape[-1]), np.float32)
    none = np.zeros(1 if kv_indptr is None else np.size(kv_indptr), np.int32)
    qo_indptr = np.zeros(2, np.int32) if kv_indptr is None else none
    batch = KeyBatch.of(
        op,
        queries,
        k,
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        kv_len=kv_len,
        kv_layout=kv_layout,
        at=at,
    )
    if page_size is None:
        expect(kv_indices is not None, f"[{op}] page_size", "a number, of ragged keys", None)
        page_size = batch.page_size
    if batch.kv_indices is None:
        pages = int((-(-batch.kv_len.astype(np.int64) // max(page_size, 1))).sum())
    else:
        pages = int(batch.kv_indices[: batch.kv_indptr[-1]].max(initial=-1)) + 1
    call = partial(
        _core.page_bounds,
        batch.arrays(op),
        *batch.lists,
        page_size=page_size,
        num_kv_heads=batch.num_kv_heads,
        head_dim=batch.head_dim,
        kv_layout=batch.kv_layout,
        pool=at.executor,
    )
    return at.made(k, (2, pages, batch.num_kv_heads, batch.head_dim), call)


def topk_pages(
    q: Any,
    bounds: Any = None,
    *,
    num_pages: int,
    page_size: int,
    kv_len: Any,
    scores: Any = None,
    num_kv_heads: int | None = None,
    qo_indptr: Any = None,
    kv_indptr: Any = None,
    kv_indices: Any = None,
    sink_tokens: int = 0,
    local_tokens: int = 0,
    causal: bool = True,
    pool: ThreadPool | Queue | None = None,
) -> BlockIndex:
    """The pages of each KV head whose keys may have the highest logits (Quest, arXiv:2406.10774,
    section 3.3), for all rows of a sequence: those of a decode step, or of a few drafted tokens.

    A page's score is the greatest that a product with a key within its bounds can be, in any row
    and head of the group.

    Args:
        q: [T, num_qo_heads, head_dim], a row a sequence or by qo_indptr.
        bounds: of `page_bounds`; or
        scores: float32 [num_qo_heads or num_kv_heads, sum of ceil(kv_len / page_size)] with
            num_kv_heads: scores of another kind, the pages of a sequence in order.
        num_pages: of a KV head and sequence, beside those of its first and its nearest tokens.
        kv_indptr, kv_indices: int32, which pages the bounds are of; default: ragged keys.
    """
    op = "topk_pages"
    at = place_of(q, pool, f"[{op}] q")
    queries = contiguous_rows(view_3d(q, f"[{op}] q", at))
    expect(num_pages >= 0, f"[{op}] num_pages", "0 or more", num_pages)
    expect(page_size > 0, f"[{op}] page_size", "a positive number", page_size)
    lengths = indices(kv_len, f"[{op}] kv_len")
    if qo_indptr is None:
        qo_indptr = np.arange(queries.shape[0] + 1, dtype=np.int32)
    rows = indptr(qo_indptr, f"[{op}] qo_indptr", lengths.size + 1)
    expect((bounds is None) != (scores is None), f"[{op}] bounds", "either bounds or scores", None)
    if bounds is not None:
        limits = at.dense(bounds, f"[{op}] bounds")
        expect(limits.ndim == 4, f"[{op}] bounds", "4 dimensions", f"shape {limits.shape}")
        num_kv_heads = int(limits.shape[2])
        if kv_indptr is None:
            kv_indptr = np.concatenate([[0], np.cumsum(lengths)])
        starts = indptr(kv_indptr, f"[{op}] kv_indptr", lengths.size + 1)
        listed = None if kv_indices is None else indices(kv_indices, f"[{op}] kv_indices")
        page_scores = _page_scores(at, queries, limits, (rows, starts, listed, lengths), page_size)
    else:
        page_scores = to_host(scores, f"[{op}] scores")
        expect(num_kv_heads is not None, f"[{op}] num_kv_heads", "a number with scores", None)
    heads = int(num_kv_heads or 0)
    lists = _core.page_lists(
        rows,
        lengths,
        heads,
        causal,
        sink_tokens,
        local_tokens,
        page_scores,
        page_size,
        num_pages,
        at.executor if isinstance(at, HostPlace) else None,
    )
    block = max(1, int(np.diff(rows).max(initial=0)))
    return block_index(lists, rows, lengths, (int(queries.shape[1]), heads), block, causal)


def _page_scores(
    at: Place, q: AnyView, bounds: AnyView, lists: tuple[Any, ...], page_size: int
) -> Any:
    """How high logits of pages may be, float32 [num_qo_heads, pages], on the host."""
    pages = int((-(-lists[-1].astype(np.int64) // page_size)).sum())
    scores = at.temporary((q.shape[1], pages), np.float32)
    _core.page_scores(
        q,
        bounds,
        *lists,
        page_size=page_size,
        num_qo_heads=q.shape[1],
        num_kv_heads=int(bounds.shape[2]),
        head_dim=q.shape[2],
        pool=at.executor,
        out=scores,
    )
    return at.values(scores)

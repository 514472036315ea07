"""Writing keys and values to the pages of a cache, named as in FlashInfer; `decode` describes
caches."""

from typing import Any

import numpy as np

from effinfer import _core
from effinfer._core import Queue, ThreadPool
from effinfer.ops.shared.arrays import empty, result
from effinfer.ops.shared.options import (
    LAYOUTS,
    contiguous_rows,
    expect,
    indices,
    indptr,
    kv_views,
    one_of,
    view_3d,
)
from effinfer.ops.shared.places import HOST, AnyView, Place, place_of


def get_seq_lens(kv_indptr: Any, kv_last_page_len: Any, page_size: int) -> Any:
    """Tokens of each sequence, int32 [B]: max(pages - 1, 0) * page_size + kv_last_page_len."""
    op = "[get_seq_lens]"
    at = place_of(kv_indptr, None, f"{op} kv_indptr")
    if at.on_gpu:
        starts = at.dense(kv_indptr, f"{op} kv_indptr")
        made, memory = at.empty(kv_indptr, (max(starts.size - 1, 0),), np.int32)
        last = at.dense(kv_last_page_len, f"{op} kv_last_page_len")
        _core.page_lengths(starts, last, page_size, memory, at.executor)
        return made
    pages = np.diff(indptr(kv_indptr, f"{op} kv_indptr"))
    last = indices(kv_last_page_len, f"{op} kv_last_page_len")
    expect(last.size == pages.size, f"{op} kv_last_page_len", f"{pages.size} values", last.size)
    expect(page_size > 0, f"{op} page_size", "a positive number", page_size)
    lengths, lengths_view = empty(kv_indptr, pages.shape, np.int32)
    lengths_view[...] = np.maximum(pages - 1, 0) * page_size + last
    return lengths


def get_batch_indices_positions(
    append_indptr: Any,
    seq_lens: Any,
    nnz: int,
    batch_indices: Any = None,
    positions: Any = None,
) -> tuple[Any, Any]:
    """The sequence and the position of every appended row, int32 [nnz] each.

    Args:
        append_indptr: int32 [B + 1]: rows append_indptr[b]:append_indptr[b + 1] become the last
            tokens of sequence b.
        seq_lens: int32 [B]: tokens of the sequences, the appended ones included.
        nnz: append_indptr[B], or more: what follows has the sequence -1 and the position 0.
        batch_indices, positions: where results go: int32 [nnz], C-contiguous; they are returned.
    """
    op = "[get_batch_indices_positions]"
    at = place_of(append_indptr, None, f"{op} append_indptr")
    if at.on_gpu:
        owners, batch_view = at.result(
            append_indptr, (nnz,), np.int32, batch_indices, f"{op} batch_indices"
        )
        places, places_view = at.result(
            append_indptr, (nnz,), np.int32, positions, f"{op} positions"
        )
        lists = at.dense(append_indptr, f"{op} append_indptr"), at.dense(seq_lens, f"{op} seq_lens")
        _core.batch_indices_positions(*lists, batch_view, places_view, at.executor)
        return owners, places
    starts = indptr(append_indptr, f"{op} append_indptr")
    lengths = indices(seq_lens, f"{op} seq_lens")
    counts = np.diff(starts)
    ok = lengths.size == counts.size and bool((lengths >= counts).all())
    expect(ok, f"{op} seq_lens", f"{counts.size} lengths, none below its rows", lengths.size)
    expected = f"{starts[-1]}, the last of append_indptr, or more"
    expect(nnz >= starts[-1], f"{op} nnz", expected, nnz)
    owners, batch_view = result(
        append_indptr, (nnz,), np.int32, batch_indices, f"{op} batch_indices"
    )
    places, places_view = result(append_indptr, (nnz,), np.int32, positions, f"{op} positions")
    rows = int(starts[-1])
    batch_view[:rows] = np.repeat(np.arange(counts.size, dtype=np.int32), counts)
    batch_view[rows:] = -1
    places_view[:rows] = np.arange(rows) + np.repeat(lengths - starts[1:], counts)
    places_view[rows:] = 0
    return owners, places


def append_paged_kv_cache(
    append_key: Any,
    append_value: Any,
    batch_indices: Any,
    positions: Any,
    paged_kv_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    kv_layout: str = "NHD",
    *,
    pool: ThreadPool | Queue | None = None,
) -> None:
    """Writes rows to the pages of their sequences, which already count them.

    Args:
        append_key, append_value: [N, num_kv_heads, head_dim], of the cache's dtype, or floats that
            are rounded to it.
        batch_indices, positions: int32 [N], as of `get_batch_indices_positions`; two rows must not
            have the same place.
        kv_indices, kv_indptr, kv_last_page_len: the pages, int32, as of the wrappers' plan().

    On a GPU the lists lie there too; nobody looks at their values, and rows of the sequence -1 are
    left out.
    """
    op = "append_paged_kv_cache"
    one_of(kv_layout, LAYOUTS, f"[{op}] kv_layout")
    at = place_of(append_key, pool, f"[{op}] append_key")
    k_cache, v_cache = kv_views(op, paged_kv_cache, kv_layout, at=at)
    _core.append_paged_kv_cache(
        contiguous_rows(_rows(at, append_key, f"[{op}] append_key")),
        contiguous_rows(_rows(at, append_value, f"[{op}] append_value")),
        _list(at, batch_indices, f"[{op}] batch_indices"),
        _list(at, positions, f"[{op}] positions"),
        k_cache,
        v_cache,
        _list(at, kv_indices, f"[{op}] kv_indices"),
        _list(at, kv_indptr, f"[{op}] kv_indptr"),
        _list(at, kv_last_page_len, f"[{op}] kv_last_page_len"),
        kv_layout=kv_layout,
        pool=at.executor,
    )


def append_paged_mla_kv_cache(
    append_ckv: Any,
    append_kpe: Any,
    batch_indices: Any,
    positions: Any,
    ckv_cache: Any,
    kpe_cache: Any,
    kv_indices: Any,
    kv_indptr: Any,
    kv_last_page_len: Any,
    *,
    pool: ThreadPool | Queue | None = None,
) -> None:
    """`append_paged_kv_cache` for latent attention: rows [N, dim] and caches [num_pages, page_size,
    dim] of the compressed keys and of their rotated part."""
    op = "[append_paged_mla_kv_cache]"
    at = place_of(append_ckv, pool, f"{op} append_ckv")
    _core.append_paged_kv_cache(
        contiguous_rows(_rows(at, append_ckv, f"{op} append_ckv")[:, None]),
        contiguous_rows(_rows(at, append_kpe, f"{op} append_kpe")[:, None]),
        _list(at, batch_indices, f"{op} batch_indices"),
        _list(at, positions, f"{op} positions"),
        mla_pages(ckv_cache, f"{op} ckv_cache", at),
        mla_pages(kpe_cache, f"{op} kpe_cache", at),
        _list(at, kv_indices, f"{op} kv_indices"),
        _list(at, kv_indptr, f"{op} kv_indptr"),
        _list(at, kv_last_page_len, f"{op} kv_last_page_len"),
        mla=True,
        pool=at.executor,
    )


def mla_pages(x: Any, argument: str, at: Place = HOST) -> AnyView:
    """[num_pages, page_size, dim] as pages of one head."""
    return view_3d(x, argument, at)[:, :, None]


def _rows(at: Place, x: Any, argument: str) -> AnyView:
    rows = at.view(x, argument)
    expect(rows.ndim > 1, argument, "rows", f"shape {rows.shape}")
    return rows


def _list(at: Place, x: Any, argument: str) -> AnyView:
    return at.dense(x, argument) if at.on_gpu else indices(x, argument)

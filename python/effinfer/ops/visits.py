"""Sparse attention over `PagedKv`: lists of the keys that blocks of query rows visit, and the
methods that choose them, for `paged_attention(visits=...)`.

`Visits(qo_indptr, kv_len, num_qo_heads, num_kv_heads)` has lists for sequences of 64 rows or more,
one for each block of up to 64 rows (`blocks`) and KV head; other sequences visit all keys, or with
`generated=True` have a list for each row, behind those of blocks, and KV head. `words`
[B, num_kv_heads, W] uint64 can be written: bit t % 64 of word t / 64 is token t of the sequence.
Whatever a method chooses, a block visits the first `sink_tokens` keys, the last `local_tokens` ones
up to each row, and its own rows'; a sequence of fewer than `min_tokens` keys visits all of them.
With `weighted=True` lists say how often keys count (effinfer.ops.drawn_visits).
"""

from effinfer import _core
from effinfer._core import PagedKv, ThreadPool, Visits
from effinfer.ops.attention import rows_over
from effinfer.ops.shared.arrays import AnyArray, optional

__all__ = ["Visits", "block_visits", "column_visits", "key_visits", "page_visits"]


def column_visits(
    visits: Visits,
    q: AnyArray,
    kv: PagedKv,
    qo_indptr: AnyArray,
    kv_indptr: AnyArray,
    kv_indices: AnyArray,
    kv_len: AnyArray,
    *,
    last_rows: int = 64,
    row_stride: int = 0,
    columns: int = 0,
    column_mass: float = 0.0,
    slashes: int = 0,
    slash_mass: float = 0.0,
    sm_scale: float | None = None,
    sink_tokens: int = 0,
    local_tokens: int = 0,
    min_tokens: int = 0,
    pool: ThreadPool | None = None,
) -> None:
    """Writes the lists: keys and distances between row and key that get the most probability
    (MInference's vertical-slash, arXiv:2407.02490; SampleAttention, arXiv:2406.15486).

    Args:
        q: float32 [T, num_qo_heads, head_dim]; each query head chooses for itself.
        last_rows, row_stride: the rows that are asked: the last ones of a sequence, or with a
            stride the last one and every so many before it.
        columns, slashes: how many keys and distances; or as few as hold a share of the
            probability, `column_mass`, `slash_mass`.
    """
    _core.column_visits(
        visits,
        *rows_over("column_visits", q, kv, qo_indptr, kv_indptr, kv_indices, kv_len),
        last_rows=last_rows,
        row_stride=row_stride,
        columns=columns,
        column_mass=column_mass,
        slashes=slashes,
        slash_mass=slash_mass,
        sm_scale=sm_scale,
        sink_tokens=sink_tokens,
        local_tokens=local_tokens,
        min_tokens=min_tokens,
        pool=pool,
    )


def block_visits(
    visits: Visits,
    q: AnyArray,
    kv: PagedKv,
    qo_indptr: AnyArray,
    kv_indptr: AnyArray,
    kv_indices: AnyArray,
    kv_len: AnyArray,
    *,
    stride: int = 0,
    queries: str = "mean",
    pages: int = 0,
    mass: float = 0.0,
    keys: int = 0,
    share: float = 0.0,
    sm_scale: float | None = None,
    sink_tokens: int = 0,
    local_tokens: int = 0,
    min_tokens: int = 0,
    pool: ThreadPool | None = None,
) -> None:
    """Writes the lists: pages of 64 keys for each block of rows, by the softmax over pages of mean
    products (stride 0: MInference's block-sparse, arXiv:2407.02490), or of sums on antidiagonals
    of cells of `stride` rows and keys, 4 to 64 (XAttention, arXiv:2503.16428).

    Args:
        q: float32 [T, num_qo_heads, head_dim].
        queries: what mean products are of: the "mean" of a head's queries in a block, or a "probe",
            their weighted mean, in which a token counts by its squared distance from the mean over
            the variances of the dimensions of its KV head's queries (ActQKV, arXiv:2502.13542).
        pages: how many each query head chooses; or with `mass` as few as hold that share of the
            scores.
        keys, share: in place of these how many a KV head's heads choose, by the sum of their
            scores, in whole pages, or which share of the pages that are chosen from, whichever is
            more: those behind the whole pages of `sink_tokens` and before `local_tokens`.
    """
    _core.block_visits(
        visits,
        *rows_over("block_visits", q, kv, qo_indptr, kv_indptr, kv_indices, kv_len),
        stride=stride,
        queries=queries,
        pages=pages,
        mass=mass,
        keys=keys,
        share=share,
        sm_scale=sm_scale,
        sink_tokens=sink_tokens,
        local_tokens=local_tokens,
        min_tokens=min_tokens,
        pool=pool,
    )


def page_visits(
    visits: Visits,
    q: AnyArray,
    kv: PagedKv,
    qo_indptr: AnyArray,
    kv_indptr: AnyArray,
    kv_indices: AnyArray,
    kv_len: AnyArray,
    *,
    unit: int = 64,
    means: bool = False,
    keys: int = 0,
    share: float = 0.0,
    vote: str = "highest",
    sm_scale: float | None = None,
    sink_tokens: int = 0,
    local_tokens: int = 0,
    min_tokens: int = 0,
    window_left: int = -1,
    pool: ThreadPool | None = None,
) -> None:
    """Writes the lists of generated rows: units of 16, 32 or 64 keys by how high their logits may
    be, as the least and the greatest key of each dimension bound them (Quest, arXiv:2406.10774); or
    units of 16 by their mean keys, or pages of 64 by those of windows of 32 (InfLLM v2, of
    MiniCPM4, arXiv:2506.07900).

    Args:
        q: float32 [T, num_qo_heads, head_dim].
        means: by means, with a unit of 16 or 64.
        keys, share: how many, in whole units, or which share of the units that are chosen from,
            whichever is more: those behind the whole pages of `sink_tokens` and before the pages
            of whole `local_tokens`, the row's own page and the one before it, which are visited in
            any case.
        vote: what the query heads of a KV head make of their scores, each with a softmax over the
            units, or the windows: the "highest", or the "sum".
        min_tokens: rows behind fewer keys visit all of them.
        window_left: at least 0 of attention with such a window: rows choose from pages that lie
            within it, visit what it shows of the page before, and min_tokens is of its keys.
    """
    _core.page_visits(
        visits,
        *rows_over("page_visits", q, kv, qo_indptr, kv_indptr, kv_indices, kv_len),
        unit=unit,
        means=means,
        keys=keys,
        share=share,
        vote=vote,
        sm_scale=sm_scale,
        sink_tokens=sink_tokens,
        local_tokens=local_tokens,
        min_tokens=min_tokens,
        window_left=window_left,
        pool=pool,
    )


def key_visits(
    visits: Visits,
    q: AnyArray,
    kv: PagedKv,
    qo_indptr: AnyArray,
    kv_indptr: AnyArray,
    kv_indices: AnyArray,
    kv_len: AnyArray,
    *,
    channels: AnyArray | None = None,
    keys: int = 0,
    share: float = 0.0,
    vote: str = "highest",
    sm_scale: float | None = None,
    sink_tokens: int = 0,
    local_tokens: int = 0,
    min_tokens: int = 0,
    window_left: int = -1,
    pool: ThreadPool | None = None,
) -> None:
    """Writes the lists of generated rows: single keys by their logits (TokenSelect,
    arXiv:2411.02886), or by what some channels add to these (Double Sparsity, arXiv:2408.07092).

    Args:
        q: float32 [T, num_qo_heads, head_dim].
        channels: int32 [num_kv_heads, n], ascending; None: all.
        keys, share, vote, min_tokens, window_left: as page_visits() has them, with units of one
            key.
    """
    _core.key_visits(
        visits,
        *rows_over("key_visits", q, kv, qo_indptr, kv_indptr, kv_indices, kv_len),
        channels=optional(channels, "[key_visits] channels"),
        keys=keys,
        share=share,
        vote=vote,
        sm_scale=sm_scale,
        sink_tokens=sink_tokens,
        local_tokens=local_tokens,
        min_tokens=min_tokens,
        window_left=window_left,
        pool=pool,
    )

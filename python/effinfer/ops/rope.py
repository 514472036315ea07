"""Rotary position embedding of queries and keys (arXiv:2104.09864): names of flashinfer.rope.

q [T, Hq, D] and k [T, Hk, D] are float32, float16 or bfloat16 with contiguous heads; other strides
are as they come, so that slices of a fused qkv product are rotated where they lie. Arithmetic is
float32, rounded once; the angle position * frequency is a float32, as in the reference
implementations. Results are of the types of q and k; the `_inplace` forms write to them.

Parameters that the operators share:

    rotary_dim  leading dimensions of a head that rotate, even; default all. The rest is copied.
    interleave  pairs (2i, 2i + 1); else (i, i + rotary_dim / 2)
    rope_scale  divides the frequencies (arXiv:2306.15595)
    rope_theta  frequency i is rope_theta^(-2i / rotary_dim)
    indptr      int32 or int64 [S + 1]: sequence s is the rows indptr[s]:indptr[s + 1] of q and k
    offsets     int32 or int64 [S]: position of the first row of each sequence
    pos_ids     int32 or int64 [T]: position of each row

`apply_llama31_*` stretch long wavelengths as Llama 3.1 does: "llama3" of `rope_frequencies`.
"""

from effinfer._core import Queue, ThreadPool
from effinfer.ops.rope_tables import apply_scaled, apply_table, linear, llama31, ragged_positions
from effinfer.ops.shared.arrays import AnyArray, ArrayT
from effinfer.ops.shared.options import errors_of


@errors_of("apply_rope")
def apply_rope(
    q: ArrayT,
    k: ArrayT,
    indptr: AnyArray,
    offsets: AnyArray,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
    *,
    pool: ThreadPool | Queue | None = None,
) -> tuple[ArrayT, ArrayT]:
    """q and k of ragged sequences, rotated by their positions."""
    scaling = linear(rope_scale, rope_theta)
    return apply_scaled(
        q,
        k,
        ragged_positions(q, indptr, offsets, pool),
        rotary_dim,
        interleave,
        scaling,
        False,
        pool,
    )


@errors_of("apply_rope_inplace")
def apply_rope_inplace(
    q: AnyArray,
    k: AnyArray,
    indptr: AnyArray,
    offsets: AnyArray,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
    *,
    pool: ThreadPool | Queue | None = None,
) -> None:
    """`apply_rope` in place."""
    scaling = linear(rope_scale, rope_theta)
    apply_scaled(
        q,
        k,
        ragged_positions(q, indptr, offsets, pool),
        rotary_dim,
        interleave,
        scaling,
        True,
        pool,
    )


@errors_of("apply_rope_pos_ids")
def apply_rope_pos_ids(
    q: ArrayT,
    k: ArrayT,
    pos_ids: AnyArray,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
    *,
    pool: ThreadPool | Queue | None = None,
) -> tuple[ArrayT, ArrayT]:
    """q and k rotated by the positions of their rows."""
    scaling = linear(rope_scale, rope_theta)
    return apply_scaled(q, k, pos_ids, rotary_dim, interleave, scaling, False, pool)


@errors_of("apply_rope_pos_ids_inplace")
def apply_rope_pos_ids_inplace(
    q: AnyArray,
    k: AnyArray,
    pos_ids: AnyArray,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 1,
    rope_theta: float = 1e4,
    *,
    pool: ThreadPool | Queue | None = None,
) -> None:
    """`apply_rope_pos_ids` in place."""
    scaling = linear(rope_scale, rope_theta)
    apply_scaled(q, k, pos_ids, rotary_dim, interleave, scaling, True, pool)


@errors_of("apply_llama31_rope")
def apply_llama31_rope(
    q: ArrayT,
    k: ArrayT,
    indptr: AnyArray,
    offsets: AnyArray,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
    *,
    pool: ThreadPool | Queue | None = None,
) -> tuple[ArrayT, ArrayT]:
    """`apply_rope` with the frequencies of Llama 3.1."""
    scaling = llama31(rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    return apply_scaled(
        q,
        k,
        ragged_positions(q, indptr, offsets, pool),
        rotary_dim,
        interleave,
        scaling,
        False,
        pool,
    )


@errors_of("apply_llama31_rope_inplace")
def apply_llama31_rope_inplace(
    q: AnyArray,
    k: AnyArray,
    indptr: AnyArray,
    offsets: AnyArray,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
    *,
    pool: ThreadPool | Queue | None = None,
) -> None:
    """`apply_llama31_rope` in place."""
    scaling = llama31(rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    apply_scaled(
        q,
        k,
        ragged_positions(q, indptr, offsets, pool),
        rotary_dim,
        interleave,
        scaling,
        True,
        pool,
    )


@errors_of("apply_llama31_rope_pos_ids")
def apply_llama31_rope_pos_ids(
    q: ArrayT,
    k: ArrayT,
    pos_ids: AnyArray,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
    *,
    pool: ThreadPool | Queue | None = None,
) -> tuple[ArrayT, ArrayT]:
    """`apply_rope_pos_ids` with the frequencies of Llama 3.1."""
    scaling = llama31(rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    return apply_scaled(q, k, pos_ids, rotary_dim, interleave, scaling, False, pool)


@errors_of("apply_llama31_rope_pos_ids_inplace")
def apply_llama31_rope_pos_ids_inplace(
    q: AnyArray,
    k: AnyArray,
    pos_ids: AnyArray,
    rotary_dim: int | None = None,
    interleave: bool = False,
    rope_scale: float = 8,
    rope_theta: float = 5e5,
    low_freq_factor: float = 1,
    high_freq_factor: float = 4,
    old_context_len: int = 8192,
    *,
    pool: ThreadPool | Queue | None = None,
) -> None:
    """`apply_llama31_rope_pos_ids` in place."""
    scaling = llama31(rope_scale, rope_theta, low_freq_factor, high_freq_factor, old_context_len)
    apply_scaled(q, k, pos_ids, rotary_dim, interleave, scaling, True, pool)


@errors_of("apply_rope_with_cos_sin_cache")
def apply_rope_with_cos_sin_cache(
    positions: AnyArray,
    query: ArrayT,
    key: ArrayT,
    head_size: int,
    cos_sin_cache: AnyArray,
    is_neox: bool = True,
    *,
    pool: ThreadPool | Queue | None = None,
) -> tuple[ArrayT, ArrayT]:
    """query and key rotated by the entries of a table, as vLLM and SGLang call it.

    Args:
        positions: int32 or int64 [T], entries of the cache.
        query, key: [T, heads * head_size].
        cos_sin_cache: float32 [N, rotary_dim]: rotary_dim / 2 cosines, then the sines; of
            `rope_table`, say.
        is_neox: pairs (i, i + rotary_dim / 2), else (2i, 2i + 1).
    """
    return apply_table(positions, query, key, head_size, cos_sin_cache, is_neox, False, pool)


@errors_of("apply_rope_with_cos_sin_cache_inplace")
def apply_rope_with_cos_sin_cache_inplace(
    positions: AnyArray,
    query: AnyArray,
    key: AnyArray,
    head_size: int,
    cos_sin_cache: AnyArray,
    is_neox: bool = True,
    *,
    pool: ThreadPool | Queue | None = None,
) -> None:
    """`apply_rope_with_cos_sin_cache` in place."""
    apply_table(positions, query, key, head_size, cos_sin_cache, is_neox, True, pool)

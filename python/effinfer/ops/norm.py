"""Norms of rows, by the names of flashinfer.norm.

`input`, `residual` and `out` are float32, float16 or bfloat16 [..., D] of one type; weights [D] are
float32 or of that type. Rows are contiguous, leading dimensions may be strided (the heads of a
slice of a fused qkv product). Arithmetic is float32, rounded once at the end; a row's result is the
same bits on every CPU, in any batch and for any number of threads. `enable_pdl`, which overlaps
launches on GPUs, is taken and has no effect.
"""

from effinfer import _core
from effinfer._core import Queue, ThreadPool
from effinfer.ops.shared.arrays import AnyArray, ArrayT
from effinfer.ops.shared.places import place_of


def rmsnorm(
    input: ArrayT,
    weight: AnyArray,
    eps: float = 1e-6,
    out: ArrayT | None = None,
    enable_pdl: bool | None = None,
    *,
    pool: ThreadPool | Queue | None = None,
) -> ArrayT:
    """input / sqrt(mean(input^2) + eps) * weight (arXiv:1910.07467).

    Args:
        input: [..., D].
        weight: [D].
        out: C-contiguous, as input; may be input.
    """
    return _rmsnorm(input, weight, eps, out, 0.0, pool)


def gemma_rmsnorm(
    input: ArrayT,
    weight: AnyArray,
    eps: float = 1e-6,
    out: ArrayT | None = None,
    enable_pdl: bool | None = None,
    *,
    pool: ThreadPool | Queue | None = None,
) -> ArrayT:
    """`rmsnorm` with weight + 1 for the weight, as Gemma's checkpoints have it."""
    return _rmsnorm(input, weight, eps, out, 1.0, pool)


def fused_add_rmsnorm(
    input: AnyArray,
    residual: AnyArray,
    weight: AnyArray,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
    *,
    pool: ThreadPool | Queue | None = None,
) -> None:
    """In place: residual += input, then input = rmsnorm(residual) of the unrounded sum."""
    _fused_add_rmsnorm(input, residual, weight, eps, 0.0, pool)


def gemma_fused_add_rmsnorm(
    input: AnyArray,
    residual: AnyArray,
    weight: AnyArray,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
    *,
    pool: ThreadPool | Queue | None = None,
) -> None:
    """`fused_add_rmsnorm` with weight + 1 for the weight."""
    _fused_add_rmsnorm(input, residual, weight, eps, 1.0, pool)


def layernorm(
    input: ArrayT,
    gemma: AnyArray,
    beta: AnyArray,
    eps: float = 1e-6,
    *,
    pool: ThreadPool | Queue | None = None,
) -> ArrayT:
    """(input - mean) / sqrt(variance + eps) * gemma + beta over each row (arXiv:1607.06450).

    Args:
        input: [..., D].
        gemma, beta: [D], of one type.
    """
    at = place_of(input, pool, "[layernorm] input")
    rows = at.view(input, "[layernorm] input")
    scale, shift = at.dense(gemma, "[layernorm] gemma"), at.dense(beta, "[layernorm] beta")
    normed, memory = at.result(input, rows.shape, None, None, "[layernorm] out")
    _core.layernorm(rows, scale, shift, memory, eps, at.executor)
    return normed


def _rmsnorm(
    input: ArrayT,
    weight: AnyArray,
    eps: float,
    out: ArrayT | None,
    weight_offset: float,
    pool: ThreadPool | Queue | None,
) -> ArrayT:
    at = place_of(input, pool, "[rmsnorm] input")
    rows = at.view(input, "[rmsnorm] input")
    weights = at.dense(weight, "[rmsnorm] weight")
    normed, memory = at.result(input, rows.shape, None, out, "[rmsnorm] out")
    _core.rmsnorm(rows, weights, memory, eps, weight_offset, at.executor)
    return normed


def _fused_add_rmsnorm(
    input: AnyArray,
    residual: AnyArray,
    weight: AnyArray,
    eps: float,
    weight_offset: float,
    pool: ThreadPool | Queue | None,
) -> None:
    at = place_of(input, pool, "[fused_add_rmsnorm] input")
    rows = at.writable_view(input, "[fused_add_rmsnorm] input")
    sums = at.writable_view(residual, "[fused_add_rmsnorm] residual")
    weights = at.dense(weight, "[fused_add_rmsnorm] weight")
    _core.fused_add_rmsnorm(rows, sums, weights, eps, weight_offset, at.executor)

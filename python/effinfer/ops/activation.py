"""The middle of a gated MLP (arXiv:2002.05202), by the names of flashinfer.activation.

`input` is float32, float16 or bfloat16 [..., 2 D] with contiguous rows; the result [..., D] is of
its type, computed in float32 and rounded once. `enable_pdl`, which overlaps launches on GPUs, is
taken and has no effect.
"""

from collections.abc import Callable

from effinfer import _core
from effinfer._core import Queue, ThreadPool
from effinfer.ops.shared.arrays import ArrayT
from effinfer.ops.shared.places import AnyView, place_of


def silu_and_mul(
    input: ArrayT,
    out: ArrayT | None = None,
    enable_pdl: bool | None = None,
    *,
    pool: ThreadPool | Queue | None = None,
) -> ArrayT:
    """silu(input[..., :D]) * input[..., D:] with silu(x) = x * sigmoid(x)."""
    return _gated("silu_and_mul", _core.silu_and_mul, input, out, pool)


def gelu_and_mul(
    input: ArrayT,
    out: ArrayT | None = None,
    enable_pdl: bool | None = None,
    *,
    pool: ThreadPool | Queue | None = None,
) -> ArrayT:
    """gelu(input[..., :D]) * input[..., D:] with gelu(x) = x / 2 * (1 + erf(x / sqrt(2)))."""
    return _gated("gelu_and_mul", _core.gelu_and_mul, input, out, pool)


def gelu_tanh_and_mul(
    input: ArrayT,
    out: ArrayT | None = None,
    enable_pdl: bool | None = None,
    *,
    pool: ThreadPool | Queue | None = None,
) -> ArrayT:
    """`gelu_and_mul` with the tanh form of GELU (arXiv:1606.08415)."""
    return _gated("gelu_tanh_and_mul", _core.gelu_tanh_and_mul, input, out, pool)


def _gated(
    name: str,
    kernel: Callable[[AnyView, AnyView, ThreadPool | Queue | None], None],
    input: ArrayT,
    out: ArrayT | None,
    pool: ThreadPool | Queue | None,
) -> ArrayT:
    at = place_of(input, pool, f"[{name}] input")
    rows = at.view(input, f"[{name}] input")
    shape = (*rows.shape[:-1], rows.shape[-1] // 2) if rows.ndim else ()
    gated, memory = at.result(input, shape, None, out, f"[{name}] out")
    kernel(rows, memory, at.executor)
    return gated

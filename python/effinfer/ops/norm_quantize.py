"""Norms of rows whose results are 8-bit floats, by the names of flashinfer.norm.

`out` is float8_e4m3fn or float8_e5m2 [..., D], writable, with contiguous rows; `input` and
`residual` are float32, float16 or bfloat16 of its shape; weights [D] are float32 or of the type of
`input`. `scale`, a positive number or a float32 array with one, divides the norm; what the type of
`out` cannot hold becomes its largest finite number. Arithmetic is float32, rounded once.
`enable_pdl` has no effect.
"""

from typing import Any

import numpy as np

from effinfer import _core
from effinfer._core import Queue, ThreadPool
from effinfer.ops.shared.arrays import AnyArray, dtype_name
from effinfer.ops.shared.float8 import divisor, float8_type, output, quantize, widened
from effinfer.ops.shared.options import errors_of, expect
from effinfer.ops.shared.places import AnyView, Place, place_of


@errors_of("rmsnorm_quant")
def rmsnorm_quant(
    out: AnyArray,
    input: AnyArray,
    weight: AnyArray,
    scale: Any,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
    *,
    pool: ThreadPool | Queue | None = None,
) -> None:
    """out = rmsnorm(input) / scale."""
    op = "rmsnorm_quant"
    at = place_of(input, pool, f"[{op}] input")
    result = _result(op, at, out, input)
    factor, by = divisor(scale, f"[{op}] scale", at)
    rows = widened(op, "input", input, at)
    normed = at.temporary(rows.shape, np.float32)
    weights = _weight(op, "weight", weight, input, at)
    _core.rmsnorm(rows, weights, normed, eps, 0.0, at.executor)
    quantize(op, "out", normed, factor, result, at, by)


@errors_of("fused_add_rmsnorm_quant")
def fused_add_rmsnorm_quant(
    out: AnyArray,
    input: AnyArray,
    residual: AnyArray,
    weight: AnyArray,
    scale: Any,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
    *,
    pool: ThreadPool | Queue | None = None,
) -> None:
    """residual += input, in place, then out = rmsnorm(residual) / scale of the unrounded sum."""
    op = "fused_add_rmsnorm_quant"
    at = place_of(input, pool, f"[{op}] input")
    result = _result(op, at, out, input)
    factor, by = divisor(scale, f"[{op}] scale", at)
    target = at.writable_view(residual, f"[{op}] residual")
    given = at.view(input, f"[{op}] input")
    ok = target.shape == given.shape and dtype_name(target.dtype) == dtype_name(given.dtype)
    expected = f"{dtype_name(given.dtype)} {given.shape}"
    got = f"{dtype_name(target.dtype)} {target.shape}"
    expect(ok, f"[{op}] residual", expected, got)
    weights = _weight(op, "weight", weight, input, at)
    rows = widened(op, "input", input, at, copy=True)
    wide = dtype_name(target.dtype) == "float32"
    sums = target if wide else widened(op, "residual", residual, at)
    _core.fused_add_rmsnorm(rows, sums, weights, eps, 0.0, at.executor)
    quantize(op, "out", rows, factor, result, at, by)
    if not wide:
        quantize(op, "residual", sums, 1.0, target, at)


@errors_of("layernorm_quant")
def layernorm_quant(
    out: AnyArray,
    input: AnyArray,
    gemma: AnyArray,
    beta: AnyArray,
    scale: Any,
    eps: float = 1e-6,
    *,
    pool: ThreadPool | Queue | None = None,
) -> None:
    """out = layernorm(input, gemma, beta) / scale; gemma and beta [D]."""
    op = "layernorm_quant"
    at = place_of(input, pool, f"[{op}] input")
    result = _result(op, at, out, input)
    factor, by = divisor(scale, f"[{op}] scale", at)
    rows = widened(op, "input", input, at)
    weights = (_weight(op, "gemma", gemma, input, at), _weight(op, "beta", beta, input, at))
    normed = at.temporary(rows.shape, np.float32)
    _core.layernorm(rows, *weights, normed, eps, at.executor)
    quantize(op, "out", normed, factor, result, at, by)


def _result(op: str, at: Place, out: AnyArray, input: AnyArray) -> AnyView:
    """The view of `out`, 8-bit floats of the shape of `input`."""
    argument = f"[{op}] out"
    dtype = float8_type(at.view(out, argument).dtype, argument)
    return output(at, None, at.view(input, f"[{op}] input").shape, dtype, out, argument)[1]


def _weight(op: str, name: str, weight: Any, input: Any, at: Place) -> AnyView:
    """Weights in float32, given so or in the type of the rows."""
    argument = f"[{op}] {name}"
    given = dtype_name(at.view(weight, argument).dtype)
    rows = dtype_name(at.view(input, f"[{op}] input").dtype)
    expect(given in ("float32", rows), argument, f"dtype float32 or {rows}", given)
    return at.dense(widened(op, name, weight, at), argument)

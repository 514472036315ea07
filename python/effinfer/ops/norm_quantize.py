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
from effinfer._core import ThreadPool
from effinfer.ops.shared.arrays import AnyArray, Array, dtype_name, view, writable_view
from effinfer.ops.shared.float8 import float8_type, number, output, quantize, widened
from effinfer.ops.shared.options import errors_of, expect


@errors_of("rmsnorm_quant")
def rmsnorm_quant(
    out: AnyArray,
    input: AnyArray,
    weight: AnyArray,
    scale: Any,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
    *,
    pool: ThreadPool | None = None,
) -> None:
    """out = rmsnorm(input) / scale."""
    op = "rmsnorm_quant"
    result = _result(op, out, input)
    factor = _factor(op, scale)
    rows = widened(op, "input", input, pool)
    normed = np.empty(rows.shape, np.float32)
    _core.rmsnorm(rows, _weight(op, "weight", weight, input, pool), normed, eps, 0.0, pool)
    quantize(op, "out", normed, factor, result, pool)


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
    pool: ThreadPool | None = None,
) -> None:
    """residual += input, in place, then out = rmsnorm(residual) / scale of the unrounded sum."""
    op = "fused_add_rmsnorm_quant"
    result = _result(op, out, input)
    factor = _factor(op, scale)
    target = writable_view(residual, f"[{op}] residual")
    given = view(input, f"[{op}] input")
    ok = target.shape == given.shape and dtype_name(target.dtype) == dtype_name(given.dtype)
    expected = f"{dtype_name(given.dtype)} {given.shape}"
    got = f"{dtype_name(target.dtype)} {target.shape}"
    expect(ok, f"[{op}] residual", expected, got)
    weights = _weight(op, "weight", weight, input, pool)
    rows = widened(op, "input", input, pool, copy=True)
    sums = widened(op, "residual", residual, pool)
    _core.fused_add_rmsnorm(rows, sums, weights, eps, 0.0, pool)
    quantize(op, "out", rows, factor, result, pool)
    if sums is not target:
        quantize(op, "residual", sums, 1.0, target, pool)


@errors_of("layernorm_quant")
def layernorm_quant(
    out: AnyArray,
    input: AnyArray,
    gemma: AnyArray,
    beta: AnyArray,
    scale: Any,
    eps: float = 1e-6,
    *,
    pool: ThreadPool | None = None,
) -> None:
    """out = layernorm(input, gemma, beta) / scale; gemma and beta [D]."""
    op = "layernorm_quant"
    result = _result(op, out, input)
    factor = _factor(op, scale)
    rows = widened(op, "input", input, pool)
    weights = (_weight(op, "gemma", gemma, input, pool), _weight(op, "beta", beta, input, pool))
    normed = np.empty(rows.shape, np.float32)
    _core.layernorm(rows, *weights, normed, eps, pool)
    quantize(op, "out", normed, factor, result, pool)


def _result(op: str, out: AnyArray, input: AnyArray) -> Array:
    """The view of `out`, 8-bit floats of the shape of `input`."""
    argument = f"[{op}] out"
    dtype = float8_type(view(out, argument).dtype, argument)
    return output(None, view(input, f"[{op}] input").shape, dtype, out, argument)[1]


def _factor(op: str, scale: Any) -> float:
    return float(np.float32(1.0) / np.float32(number(scale, f"[{op}] scale")))


def _weight(op: str, name: str, weight: Any, input: Any, pool: ThreadPool | None) -> Array:
    """Weights in float32, given so or in the type of the rows."""
    argument = f"[{op}] {name}"
    given = dtype_name(view(weight, argument).dtype)
    rows = dtype_name(view(input, f"[{op}] input").dtype)
    expect(given in ("float32", rows), argument, f"dtype float32 or {rows}", given)
    return np.ascontiguousarray(widened(op, name, weight, pool))

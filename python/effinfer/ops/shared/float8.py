"""Quantisation to 8-bit floats: numbers times a factor, saturated, rounded to nearest even."""

import math
from typing import Any

import numpy as np

from effinfer import _core
from effinfer._core import ThreadPool
from effinfer.ops.shared.arrays import (
    Array,
    Floats,
    dtype_name,
    empty,
    float8_e4m3fn,
    float8_e5m2,
    view,
    writable_view,
)
from effinfer.ops.shared.options import data_type_name, expect

TYPES: dict[str, np.dtype[Any]] = {"float8_e4m3fn": float8_e4m3fn, "float8_e5m2": float8_e5m2}


def float8_type(data_type: Any, argument: str) -> np.dtype[Any]:
    """The numpy type, tagged, of a dtype of any library or of its name."""
    name = data_type_name(data_type)
    expect(name in TYPES, argument, " or ".join(TYPES), name)
    return TYPES[str(name)]


def number(scale: Any, argument: str) -> float:
    """A positive number: itself, or the only element of a float32 array."""
    if not isinstance(scale, (int, float)):
        given = view(scale, argument)
        ok = given.size == 1 and given.dtype == np.float32
        expect(ok, argument, "a number", f"{dtype_name(given.dtype)} {given.shape}")
        scale = float(given.reshape(-1)[0])
    ok = math.isfinite(scale) and scale > 0
    expect(ok, argument, "a positive number", scale)
    return float(scale)


def widened(op: str, name: str, x: Any, pool: ThreadPool | None, copy: bool = False) -> Floats:
    """Rows of any float type in float32: the array itself where it is one, unless `copy`."""
    rows = view(x, f"[{op}] {name}")
    if dtype_name(rows.dtype) == "float32" and not copy:
        return rows
    wide = np.empty(rows.shape, np.float32)
    _core.convert_rows(rows, wide, op=op, argument=name, pool=pool)
    return wide


def quantize(
    op: str, name: str, x: Array, factor: float, out: Array, pool: ThreadPool | None
) -> None:
    """Writes x * factor to `out`, of an 8-bit float or of any other."""
    _core.convert_rows(x, out, factor, op=op, argument=name, pool=pool)


def output(
    like: Any, shape: tuple[int, ...], dtype: np.dtype[Any], out: Any, argument: str
) -> tuple[Any, Array]:
    """A new array of the kind of `like`, or `out`, which may have strides, and its view.

    Raises:
        InvalidArgumentError: `out` is not writable of that shape and type.
    """
    if out is None:
        return empty(like, shape, dtype)
    given = writable_view(out, argument)
    ok = given.shape == shape and dtype_name(given.dtype) == dtype_name(dtype)
    got = f"{dtype_name(given.dtype)} {given.shape}"
    expect(ok, argument, f"{dtype_name(dtype)} {shape}", got)
    return out, given

"""Quantisation to 8-bit floats: numbers times a factor, saturated, rounded to nearest even."""

import math
from typing import Any

import numpy as np

from effinfer import _core
from effinfer._core import DeviceArray
from effinfer.ops.shared.arrays import dtype_name, float8_e4m3fn, float8_e5m2, view
from effinfer.ops.shared.options import data_type_name, expect
from effinfer.ops.shared.places import AnyView, Place

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


def divisor(scale: Any, argument: str, at: Place) -> tuple[float, AnyView | None]:
    """(1 / scale, None); of an array on a GPU, at which the host does not look, (1, its view)."""
    if at.on_gpu and not isinstance(scale, (int, float)):
        given = at.dense(scale, argument)
        if isinstance(given, DeviceArray):
            ok = given.size == 1 and given.dtype == np.float32
            expect(ok, argument, "a number", f"{dtype_name(given.dtype)} {given.shape}")
            return 1.0, given.reshape((1,))
    return float(np.float32(1.0) / np.float32(number(scale, argument))), None


def widened(op: str, name: str, x: Any, at: Place, copy: bool = False) -> AnyView:
    """Rows of any float type in float32: the array itself where it is one, unless `copy`."""
    rows = at.view(x, f"[{op}] {name}")
    if dtype_name(rows.dtype) == "float32" and not copy:
        return rows
    wide = at.temporary(rows.shape, np.float32)
    _core.convert_rows(rows, wide, op=op, argument=name, pool=at.executor)
    return wide


def quantize(
    op: str,
    name: str,
    x: AnyView,
    factor: float,
    out: AnyView,
    at: Place,
    divisor: AnyView | None = None,
) -> None:
    """Writes x * factor / divisor to `out`, of an 8-bit float or of any other."""
    _core.convert_rows(x, out, factor, op=op, argument=name, divisor=divisor, pool=at.executor)


def output(
    at: Place, like: Any, shape: tuple[int, ...], dtype: np.dtype[Any], out: Any, argument: str
) -> tuple[Any, AnyView]:
    """A new array of the kind of `like`, or `out`, which may have strides, and its view.

    Raises:
        InvalidArgumentError: `out` is not writable of that shape and type.
    """
    if out is None:
        return at.empty(like, shape, dtype)
    given = at.writable_view(out, argument)
    ok = given.shape == tuple(shape) and dtype_name(given.dtype) == dtype_name(dtype)
    got = f"{dtype_name(given.dtype)} {given.shape}"
    expect(ok, argument, f"{dtype_name(dtype)} {tuple(shape)}", got)
    return out, given

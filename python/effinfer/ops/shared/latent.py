"""The two parts of queries and keys of latent attention."""

from typing import Any

import numpy as np

from effinfer import _core
from effinfer.ops.shared.float8 import number
from effinfer.ops.shared.float32 import as_float32
from effinfer.ops.shared.options import contiguous_rows, expect
from effinfer.ops.shared.places import AnyView, Place


def parts_of(argument: str, whole: Any, pair: tuple[Any, Any], split: int) -> tuple[Any, Any]:
    """The latent part and the rotated part of queries or of pages."""
    missing = any(part is None for part in pair)
    if whole is None:
        expect(not missing, argument, "an array or both of its parts", None)
        return pair
    ok = all(part is None for part in pair)
    expect(ok, argument, "None beside its parts", "an array")
    if isinstance(whole, (tuple, list)):
        expect(len(whole) == 2, argument, "two parts", len(whole))
        return whole[0], whole[1]
    return whole[..., :split], whole[..., split:]


def expect_shape(x: AnyView, shape: tuple[int, ...], argument: str) -> None:
    expect(x.shape == shape, argument, f"shape {shape}", x.shape)


def scales_of(op: str, ckv_scale: float | None, kpe_scale: float | None) -> tuple[float, float]:
    """That of the latent part, and what that of the rotated one is of it; None: 1."""
    latent = number(1.0 if ckv_scale is None else ckv_scale, f"{op} ckv_scale")
    return latent, number(1.0 if kpe_scale is None else kpe_scale, f"{op} kpe_scale") / latent


def scaled_queries(pe: AnyView, factor: float, argument: str, at: Place) -> AnyView:
    """Rotated queries, times what the scale of their keys is of the scale of the latent part: a
    kernel multiplies both by that one."""
    if factor == 1.0:
        return contiguous_rows(pe)
    if not at.on_gpu:
        return as_float32(pe, argument) * np.float32(factor)
    op, _, name = argument[1:].partition("] ")
    scaled = at.temporary(pe.shape, np.float32)
    rows = contiguous_rows(pe)
    _core.convert_rows(rows, scaled, factor, op=op, argument=name, pool=at.executor)
    return scaled

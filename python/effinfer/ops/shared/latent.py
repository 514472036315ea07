"""The two parts of queries and keys of latent attention."""

from typing import Any, cast

import numpy as np

from effinfer.ops.shared.arrays import Array
from effinfer.ops.shared.float32 import as_float32
from effinfer.ops.shared.options import contiguous_rows, expect


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


def scaled_queries(pe: Array, factor: float, argument: str) -> Array:
    """Rotated queries, times what the scale of their keys is of the scale of the latent part: a
    kernel multiplies both by that one."""
    if factor == 1.0:
        return cast(Array, contiguous_rows(pe))
    scaled: Array = as_float32(pe, argument) * np.float32(factor)
    return scaled

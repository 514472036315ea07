"""The two parts of queries and keys of latent attention."""

from typing import Any

import numpy as np

from effinfer.ops.shared.arrays import Array
from effinfer.ops.shared.options import contiguous_rows, expect
from effinfer.ops.shared.planned import as_float32


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


def scaled_queries(pe: Array, kpe_scale: float, ckv_scale: float, op: str) -> Array:
    """Rotated queries for keys that a kernel multiplies by ckv_scale, where kpe_scale is meant."""
    ok = kpe_scale > 0 and np.isfinite(kpe_scale)
    expect(ok, f"{op} kpe_scale", "a positive number", kpe_scale)
    if kpe_scale == ckv_scale:
        return contiguous_rows(pe)
    scaled: Array = as_float32(pe, f"{op} q_pe") * np.float32(kpe_scale / ckv_scale)
    return scaled

"""float32 to and from the narrower floats, bfloat16 among them."""

import numpy as np

from effinfer._core import UnsupportedError
from effinfer.ops.shared.arrays import Array, dtype_name


def as_float32(array: Array, argument: str) -> Array:
    """Exactly, of float32, float16 or bfloat16."""
    name = dtype_name(array.dtype)
    if name in ("float32", "float16"):
        return np.ascontiguousarray(array, np.float32)
    if name != "bfloat16":
        raise UnsupportedError(
            f"{argument}: ROPE_LLAMA rotates float32, float16 or bfloat16, got {name}"
        )
    return (np.ascontiguousarray(array).astype(np.uint32) << 16).view(np.float32)


def from_float32(array: Array, out: Array) -> None:
    """Rounds to the dtype of `out`, to nearest even."""
    if dtype_name(out.dtype) != "bfloat16":
        out[...] = array
        return
    bits = array.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    out[...] = np.where(np.isnan(array), bits >> 16 | 0x40, rounded)

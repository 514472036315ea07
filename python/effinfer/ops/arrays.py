"""What the operators take and return."""

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.int8]


def dense(array: npt.ArrayLike) -> Array:
    """The array itself when it is C-contiguous, else a copy."""
    return np.asarray(array, order="C")


def optional(array: Array | None) -> Array | None:
    return None if array is None else dense(array)

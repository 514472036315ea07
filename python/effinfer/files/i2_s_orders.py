"""The orders of i2_s: bitnet.cpp packs the type as its build's kernels read it, and no file says
how.

x86   blocks of 128 weights, 32 bytes: byte i holds i, 32 + i, 64 + i and 96 + i (effinfer's own)
arm   blocks of 64 weights, 16 bytes: byte i holds i, 16 + i, 32 + i and 48 + i
rows  four rows in one: byte i of row r holds column i of the rows 4r, 4r + 1, 4r + 2 and 4r + 3

Each from the top bits down. Source: quantize_i2_s() in ggml-bitnet-mad.cpp.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from effinfer import _core

ORDERS = ("x86", "arm", "rows")
_SHIFTS = np.array([6, 4, 2, 0], np.uint8)[:, None]
_TAIL = 32

Bytes = npt.NDArray[np.uint8]


def in_x86_order(data: Bytes, shape: Sequence[int], order: str) -> Bytes:
    """The bytes of an i2_s tensor that lies in another order. Throws FormatError for rows that the
    order cannot hold."""
    if order == "x86" or data.size == 0:
        return data
    body = data[:-_TAIL]
    cols = shape[-1]
    if order == "arm":
        codes = (body.reshape(-1, 1, 16) >> _SHIFTS) & 3
    elif (data.size - _TAIL) * 4 // cols % 4 == 0:
        codes = (body.reshape(-1, 1, cols) >> _SHIFTS) & 3
    else:
        raise _core.FormatError(f"[quantize] i2_s order rows: expected fours, got {list(shape)}")
    fields = codes.reshape(-1, 4, 32) << _SHIFTS
    blocks = np.bitwise_or.reduce(fields, axis=1)
    return np.concatenate([blocks.ravel(), data[-_TAIL:]])

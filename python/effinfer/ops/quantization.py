"""Booleans as bits, by the names of flashinfer.quantization."""

from typing import Any

import numpy as np

from effinfer import _core
from effinfer._core import ThreadPool
from effinfer.ops.shared.arrays import AnyArray, ArrayT, as_kind, dense


def packbits(x: ArrayT, bitorder: str = "big", *, pool: ThreadPool | None = None) -> ArrayT:
    """Eight elements a byte, as numpy.packbits: uint8 [ceil(N / 8)].

    Args:
        x: bool or uint8 [N]; what is not zero is a set bit.
        bitorder: "big": the first element is the highest bit of its byte; "little": the lowest.
    """
    elements = dense(x, "[packbits] x")
    whole = np.array([0, elements.size])
    return as_kind(_core.packbits(elements, whole, bitorder, pool)[0], x)


def segment_packbits(
    x: ArrayT, indptr: AnyArray, bitorder: str = "big", *, pool: ThreadPool | None = None
) -> tuple[ArrayT, Any]:
    """`packbits` of each segment x[indptr[i]:indptr[i + 1]]: segments start at whole bytes.

    Args:
        x: bool or uint8 [N].
        indptr: int32 or int64 [S + 1], ascending from 0 to N.

    Returns:
        (y, new_indptr): y[new_indptr[i]:new_indptr[i + 1]] is segment i, uint8; new_indptr is of
        the type of indptr.
    """
    segments = dense(indptr, "[segment_packbits] indptr")
    packed, starts = _core.packbits(dense(x, "[segment_packbits] x"), segments, bitorder, pool)
    return as_kind(packed, x), as_kind(starts.astype(segments.dtype), indptr)

"""Booleans as bits, by the names of flashinfer.quantization."""

from typing import Any

import numpy as np

from effinfer import _core
from effinfer._core import Queue, ThreadPool
from effinfer.ops.shared.arrays import AnyArray, ArrayT, as_kind
from effinfer.ops.shared.places import AnyView, DevicePlace, Place, place_of, to_host


def packbits(x: ArrayT, bitorder: str = "big", *, pool: ThreadPool | Queue | None = None) -> ArrayT:
    """Eight elements a byte, as numpy.packbits: uint8 [ceil(N / 8)].

    Args:
        x: bool or uint8 [N]; what is not zero is a set bit.
        bitorder: "big": the first element is the highest bit of its byte; "little": the lowest.
    """
    at = place_of(x, pool, "[packbits] x")
    elements = at.dense(x, "[packbits] x")
    return _packed(at, x, elements, np.array([0, elements.size]), bitorder)[0]


def segment_packbits(
    x: ArrayT, indptr: AnyArray, bitorder: str = "big", *, pool: ThreadPool | Queue | None = None
) -> tuple[ArrayT, Any]:
    """`packbits` of each segment x[indptr[i]:indptr[i + 1]]: segments start at whole bytes.

    On a GPU the host waits for `indptr`, as it says how large the result is.

    Args:
        x: bool or uint8 [N].
        indptr: int32 or int64 [S + 1], ascending from 0 to N.

    Returns:
        (y, new_indptr): y[new_indptr[i]:new_indptr[i + 1]] is segment i, uint8; new_indptr is of
        the type of indptr.
    """
    at = place_of(x, pool, "[segment_packbits] x")
    elements = at.dense(x, "[segment_packbits] x")
    segments = to_host(indptr, "[segment_packbits] indptr")
    packed, starts = _packed(at, x, elements, segments, bitorder)
    narrow = starts.astype(segments.dtype)
    if not isinstance(at, DevicePlace):
        return packed, as_kind(narrow, indptr)
    # Lists of the host come back as arrays of the kind of x.
    like = x if isinstance(indptr, np.ndarray) else indptr
    made, memory = at.empty(like, narrow.shape, narrow.dtype)
    at.executor.upload(memory, narrow)
    return packed, made


def _packed(
    at: Place, like: ArrayT, elements: AnyView, segments: Any, bitorder: str
) -> tuple[ArrayT, Any]:
    """(bits, where segments start in them): the second on the host."""
    starts = _core.packed_indptr(segments, elements.size)
    packed, memory = at.empty(like, (int(starts[-1]),), np.uint8)
    lists = _there(at, segments), _there(at, starts)
    _core.packbits(elements, *lists, bitorder, memory, at.executor)
    return packed, starts


def _there(at: Place, values: Any) -> AnyView:
    if not isinstance(at, DevicePlace):
        return values
    memory = at.temporary(values.shape, values.dtype)
    at.executor.upload(memory, np.ascontiguousarray(values))
    return memory

"""Where an operator's arrays lie and it runs: on the CPU, or on a GPU in the order of a stream.

A call runs where its first array lies; on a GPU in the current stream of the array's library
(torch, CuPy), else in the legacy default one, or in the `Queue` that is given for its `pool`.
Nothing waits: results are there for what follows in that stream. Arrays elsewhere are refused by
the operator, which names them.
"""

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast

import numpy as np

from effinfer import _core
from effinfer._core import DeviceArray, InvalidArgumentError, Queue, ThreadPool
from effinfer.ops.shared import arrays
from effinfer.ops.shared.arrays import Array, ArrayT, dtype_name

AnyView = Any  # numpy's array, or a DeviceArray


class HostPlace:
    """The CPU: the functions of `arrays`."""

    __slots__ = ("executor",)

    on_gpu = False
    dense = staticmethod(arrays.dense)
    empty = staticmethod(arrays.empty)
    optional = staticmethod(arrays.optional)
    result = staticmethod(arrays.result)
    view = staticmethod(arrays.view)
    writable = staticmethod(arrays.writable)
    writable_view = staticmethod(arrays.writable_view)

    def __init__(self, pool: ThreadPool | None) -> None:
        self.executor = pool

    def temporary(self, shape: Sequence[int], dtype: Any) -> AnyView:
        """Memory for a call's own use."""
        return np.empty(shape, dtype)

    def zeros(self, like: ArrayT, shape: Sequence[int], dtype: Any) -> tuple[ArrayT, AnyView]:
        """`empty`, with zeros."""
        result, memory = self.empty(like, shape, dtype)
        memory[...] = 0
        return result, memory

    def made(self, like: ArrayT, shape: Sequence[int], call: Callable[..., Any]) -> ArrayT:
        """The float32 array that `call` makes, as the kind of `like`."""
        del shape
        return arrays.as_kind(call(), like)

    def copied(self, values: Array) -> AnyView:
        """The host's values where the call runs."""
        return values

    def values(self, array: AnyView) -> Array:
        """What a call has written, on the host."""
        return cast(Array, array)


class DevicePlace:
    """A GPU. Views are DeviceArrays over the memory of torch, CuPy and others; numpy's arrays stay
    as they are, for the operator to name."""

    __slots__ = ("executor",)

    on_gpu = True

    def __init__(self, queue: Queue) -> None:
        self.executor = queue

    def view(self, x: Any, argument: str) -> AnyView:
        if isinstance(x, DeviceArray):
            return x
        if arrays.is_torch(x) and x.is_cuda and not x.requires_grad and not x.is_neg():
            dtype = arrays.torch_dtype(x)
            if dtype is not None:
                index, stream = x.device.index, self.executor.stream
                pointer = x.data_ptr()
                return DeviceArray(pointer, x.shape, x.stride(), dtype, index, x, False, stream)
        if isinstance(x, np.ndarray) or not hasattr(x, "__dlpack__"):
            return arrays.view(x, argument)
        return _core.from_dlpack(x, argument, self.executor.stream)

    def dense(self, x: Any, argument: str) -> AnyView:
        """`view` of a C-contiguous array; torch copies others, as nothing else here can."""
        array = self.view(x, argument)
        if isinstance(array, DeviceArray) and not array.is_contiguous and arrays.is_torch(x):
            return self.view(x.contiguous(), argument)
        return array

    def optional(self, x: Any, argument: str) -> AnyView | None:
        return None if x is None else self.dense(x, argument)

    def writable_view(self, x: Any, argument: str) -> AnyView:
        array = self.view(x, argument)
        if not isinstance(array, DeviceArray):
            return array
        if array.read_only:
            raise InvalidArgumentError(
                f"{argument}: expected a writable array, got a read-only one"
            )
        return array

    def writable(self, x: Any, argument: str) -> AnyView:
        array = self.writable_view(x, argument)
        if isinstance(array, DeviceArray) and not array.is_contiguous:
            raise InvalidArgumentError(
                f"{argument}: expected a C-contiguous array, got shape {array.shape} with strides "
                f"of {array.strides} bytes"
            )
        return array

    def empty(
        self, like: ArrayT, shape: Sequence[int], dtype: Any = None
    ) -> tuple[ArrayT, AnyView]:
        """A new array of the kind of `like` on the queue's device, and its `view`; a DeviceArray
        where `like` is of a library that is not known."""
        source: Any = like
        device = self.executor.device
        if arrays.is_torch(source):
            torch = sys.modules["torch"]
            given = source.dtype if dtype is None else getattr(torch, dtype_name(np.dtype(dtype)))
            result: Any = torch.empty(tuple(shape), dtype=given, device=device)
        elif _is_cupy(source) and (dtype is None or np.dtype(dtype).metadata is None):
            cupy = sys.modules["cupy"]
            with cupy.cuda.Device(int(device.removeprefix("cuda:"))):
                result = cupy.empty(tuple(shape), source.dtype if dtype is None else dtype)
        else:
            given = self.view(like, "[empty] like").dtype if dtype is None else np.dtype(dtype)
            result = DeviceArray.empty(list(shape), given, self.executor)
        return cast(ArrayT, result), self.writable(result, "[empty] result")

    def temporary(self, shape: Sequence[int], dtype: Any) -> AnyView:
        """Memory for a call's own use."""
        return DeviceArray.empty(list(shape), np.dtype(dtype), self.executor)

    def zeros(self, like: ArrayT, shape: Sequence[int], dtype: Any) -> tuple[ArrayT, AnyView]:
        """`empty`, with zeros."""
        result, memory = self.empty(like, shape, dtype)
        self.executor.zero(memory)
        return result, memory

    def made(self, like: ArrayT, shape: Sequence[int], call: Callable[..., Any]) -> ArrayT:
        """A float32 array of that shape, which `call` writes."""
        result, memory = self.empty(like, shape, np.float32)
        call(out=memory)
        return result

    def copied(self, values: Array) -> AnyView:
        """The host's values where the call runs."""
        array = self.temporary(values.shape, values.dtype)
        self.executor.upload(array, values)
        return array

    def values(self, array: AnyView) -> Array:
        """What a call has written, on the host, which waits for it."""
        return cast(Array, array.to_numpy())

    def result(
        self, like: ArrayT, shape: Sequence[int], dtype: Any, out: Any, argument: str
    ) -> tuple[ArrayT, AnyView]:
        """What an operator returns, and its view, as `arrays.result`."""
        if out is None:
            return self.empty(like, shape, dtype)
        array = self.writable(out, argument)
        expected = self.view(like, argument).dtype if dtype is None else np.dtype(dtype)
        if array.shape != tuple(shape) or dtype_name(array.dtype) != dtype_name(expected):
            raise InvalidArgumentError(
                f"{argument}: expected {dtype_name(expected)} {tuple(shape)}, "
                f"got {dtype_name(array.dtype)} {array.shape}"
            )
        return out, array


Place = HostPlace | DevicePlace
HOST = HostPlace(None)


def to_host(x: Any, argument: str) -> Array:
    """`arrays.dense`, copied from a GPU when its current stream has run: lists of a plan."""
    if _device_of(x) is None:
        return arrays.dense(x, argument)
    array: Any = place_of(x, None, argument).dense(x, argument)
    return cast(Array, array.to_numpy())


def place_of(x: Any, pool: ThreadPool | Queue | None, argument: str) -> Place:
    """Where a call with that first array runs.

    Raises:
        InvalidArgumentError: the array lies on a device that this build lacks, or a ThreadPool is
            given for an array on a GPU.
    """
    if isinstance(pool, Queue):
        return DevicePlace(pool)
    if isinstance(x, np.ndarray):
        return HostPlace(pool)
    device = _device_of(x)
    if device is None:
        return HostPlace(pool)
    if pool is not None:
        op = argument.partition("]")[0]
        raise InvalidArgumentError(
            f"{op}] pool: expected None or a Queue on {device}, got a ThreadPool"
        )
    _core.check_device(device, argument)
    return DevicePlace(_queue(device, _current_stream(x, device)))


def _device_of(x: Any) -> str | None:
    """ "cuda:1", or None of what does not lie on a GPU of CUDA's."""
    if isinstance(x, np.ndarray):
        return None
    if isinstance(x, DeviceArray):
        return x.device
    if arrays.is_torch(x):
        return str(x.device) if x.is_cuda else None
    if not hasattr(x, "__dlpack_device__"):
        return None
    kind, index = x.__dlpack_device__()
    return f"cuda:{index}" if int(kind) == _CUDA else None


_CUDA = 2  # DLPack's kDLCUDA


def _current_stream(x: Any, device: str) -> int:
    if arrays.is_torch(x):
        return int(sys.modules["torch"].cuda.current_stream(x.device).cuda_stream)
    if _is_cupy(x):
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(int(device.removeprefix("cuda:"))):
            return int(cupy.cuda.get_current_stream().ptr)
    return int(x.stream) if isinstance(x, DeviceArray) else 0


@lru_cache(maxsize=64)
def _queue(device: str, stream: int) -> Queue:
    return Queue(device, stream)


def _is_cupy(x: Any) -> bool:
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(x, cupy.ndarray)

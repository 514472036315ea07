"""Arrays in and out of the operators: numpy, torch (CPU), ml_dtypes, anything with DLPack.

Inside, every array is a numpy view of the caller's memory. numpy has no bfloat16 and no 8-bit
floats: these travel as unsigned integers whose dtype carries a tag, which is also how a caller
without torch or ml_dtypes hands them over: `bits.view(ops.bfloat16)`.

An `argument` below is the prefix of error messages: "[rmsnorm] input".
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from effinfer import _core
from effinfer._core import DeviceArray, InvalidArgumentError, UnsupportedError

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
AnyArray = Any  # of any library
ArrayT = TypeVar("ArrayT")  # of any library: what comes out is of the kind that went in

bfloat16: np.dtype[Any] = _core.numpy_dtype("bf16")
float8_e4m3fn: np.dtype[Any] = _core.numpy_dtype("f8_e4m3")
float8_e5m2: np.dtype[Any] = _core.numpy_dtype("f8_e5m2")

# The types by the names that ml_dtypes, torch and the array API give them.
_TAGGED = {"bfloat16": bfloat16, "float8_e4m3fn": float8_e4m3fn, "float8_e5m2": float8_e5m2}
_NAMES = {"bf16": "bfloat16", "f8_e4m3": "float8_e4m3fn", "f8_e5m2": "float8_e5m2"}
_FIRST_USER_TYPE = 256  # numpy's NPY_USERDEF: types that other packages register


def dtype_name(dtype: np.dtype[Any]) -> str:
    """ "float32", "bfloat16", ...: of a numpy dtype, tagged or registered by ml_dtypes."""
    tag = dtype.metadata.get("effinfer") if dtype.metadata else None
    return dtype.name if tag is None else _NAMES[tag]


def file_type(array: Array) -> str:
    """The dtype of an array by the names of files: "f32", "bf16", ..."""
    name = dtype_name(array.dtype)
    return {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}.get(name, name)


def view(x: Any, argument: str) -> Array:
    """The memory of x as a numpy array: never a copy, any strides, read-only where x is.

    Raises:
        InvalidArgumentError: x is no array, lies in the memory of another device, has elements
            that effinfer does not know, or requires a gradient (`.detach()` it).
        UnsupportedError: x lies on a GPU, where the operator has no kernels (those that have find
            their arrays by `places`) or its first array does not lie.
    """
    if isinstance(x, np.ndarray):
        if x.dtype.num >= _FIRST_USER_TYPE and x.dtype.name in _TAGGED:
            return x.view(_TAGGED[x.dtype.name])
        return x
    if is_torch(x):
        if x.device.type != "cpu":
            _core.check_device(str(x.device), argument)
            _refuse_device(str(x.device), argument)
        shared = _torch_view(x)
        if shared is not None:
            return shared
    if hasattr(x, "__dlpack__"):
        array = x if isinstance(x, DeviceArray) else _core.from_dlpack(x, argument)
        if isinstance(array, DeviceArray):
            _refuse_device(array.device, argument)
        return cast(Array, array)
    raise InvalidArgumentError(
        f"{argument}: expected a numpy array, a torch tensor or another array with __dlpack__, "
        f"got {type(x).__name__}"
    )


def dense(x: Any, argument: str) -> Array:
    """`view` of a C-contiguous array: the same memory where it is one, else a copy."""
    array = view(x, argument)
    if array.flags.c_contiguous and array.flags.aligned:
        return array
    return np.array(array, dtype=array.dtype, order="C")


def optional(x: Any, argument: str) -> Array | None:
    """`dense` of an argument that may be None."""
    return None if x is None else dense(x, argument)


def writable_view(x: Any, argument: str) -> Array:
    """`view` of an array that is written to.

    Raises:
        InvalidArgumentError: as `view`, and for a read-only array.
    """
    array = view(x, argument)
    if not array.flags.writeable:
        raise InvalidArgumentError(f"{argument}: expected a writable array, got a read-only one")
    return array


def writable(x: Any, argument: str) -> Array:
    """`writable_view` of a C-contiguous array.

    Raises:
        InvalidArgumentError: as `writable_view`, and for an array with other strides.
    """
    array = writable_view(x, argument)
    if not (array.flags.c_contiguous and array.flags.aligned):
        raise InvalidArgumentError(
            f"{argument}: expected a C-contiguous array, got shape {array.shape} with strides of "
            f"{array.strides} bytes"
        )
    return array


def empty(like: ArrayT, shape: Sequence[int], dtype: Any = None) -> tuple[ArrayT, Array]:
    """A new C-contiguous array of the kind of `like`, and its `view`.

    Args:
        like: numpy or ml_dtypes give numpy, torch gives torch, another library its own array.
        dtype: a numpy dtype, tagged ones included; default: that of `like`.
    """
    source: Any = like
    if isinstance(source, np.ndarray):
        given = source.dtype if dtype is None else np.dtype(dtype)
        # bfloat16 beside an array of ml_dtypes is ml_dtypes' own.
        if source.dtype.num >= _FIRST_USER_TYPE and dtype_name(given) == source.dtype.name:
            given = source.dtype
        result: Any = np.empty(tuple(shape), given)
    elif is_torch(source):
        torch = sys.modules["torch"]
        given = source.dtype if dtype is None else getattr(torch, dtype_name(np.dtype(dtype)))
        result = torch.empty(tuple(shape), dtype=given)
    else:
        namespace = _namespace(source)
        given = source.dtype if dtype is None else getattr(namespace, dtype_name(np.dtype(dtype)))
        result = namespace.empty(tuple(shape), dtype=given)
    return cast(ArrayT, result), writable(result, "[empty] result")


def as_kind(result: Array, like: ArrayT) -> ArrayT:
    """A new numpy array as the kind of array that `like` is, without a copy."""
    same: Any = result
    if is_torch(like):
        same = sys.modules["torch"].from_numpy(result)
    elif not isinstance(like, np.ndarray):
        same = _namespace(like).from_dlpack(result)
    return cast(ArrayT, same)


def result(
    like: ArrayT, shape: Sequence[int], dtype: Any, out: Any, argument: str
) -> tuple[ArrayT, Array]:
    """What an operator returns, and its view: a new array as in `empty`, or `out`.

    Raises:
        InvalidArgumentError: `out` is not C-contiguous and writable of that shape and dtype.
    """
    if out is None:
        return empty(like, shape, dtype)
    array = writable(out, argument)
    expected = view(like, argument).dtype if dtype is None else np.dtype(dtype)
    if array.shape != tuple(shape) or dtype_name(array.dtype) != dtype_name(expected):
        raise InvalidArgumentError(
            f"{argument}: expected {dtype_name(expected)} {tuple(shape)}, "
            f"got {dtype_name(array.dtype)} {array.shape}"
        )
    return out, array


def torch_dtype(x: Any) -> np.dtype[Any] | None:
    """The numpy dtype, tagged or not, of a tensor's elements; None where there is none."""
    return _torch_dtypes().get(x.dtype)


@functools.cache
def _torch_dtypes() -> dict[Any, np.dtype[Any]]:
    known = _torch_carriers().items()
    return {
        name: np.dtype(str(name).removeprefix("torch.")) if tag is None else tag
        for name, (_, tag) in known
    }


def _refuse_device(device: str, argument: str) -> None:
    raise UnsupportedError(
        f"{argument}: expected an array on cpu, where this operator or its other arrays are, got "
        f"one on {device}"
    )


def _torch_view(x: Any) -> Array | None:
    """Several times faster than DLPack, which is left to say why a tensor cannot be shared."""
    carrier = _torch_carriers().get(x.dtype)
    if carrier is None or x.requires_grad or x.is_neg():
        return None
    bits, tag = carrier
    return cast(Array, x.numpy() if tag is None else x.view(bits).numpy().view(tag))


@functools.cache
def _torch_carriers() -> dict[Any, tuple[Any, np.dtype[Any] | None]]:
    """For each of torch's dtypes the integers and the tag that stand for it if numpy lacks it."""
    torch = sys.modules["torch"]
    plain = ("float32", "float16", "int8", "uint8", "int32", "int64", "bool", "uint16", "uint32")
    carriers: dict[Any, tuple[Any, np.dtype[Any] | None]] = {
        getattr(torch, name): (None, None) for name in plain if hasattr(torch, name)
    }
    for name, tag in _TAGGED.items():
        carriers[getattr(torch, name)] = (getattr(torch, tag.name), tag)
    return carriers


def is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _namespace(x: Any) -> Any:
    """The library of an array, as the array API standard names it; else numpy."""
    return x.__array_namespace__() if hasattr(x, "__array_namespace__") else np

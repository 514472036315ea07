"""Arrays of other libraries, in and out, without copies."""

import ctypes
import gc
import weakref

import ml_dtypes
import numpy as np
import pytest
import torch

from effinfer import InvalidArgumentError, _core, ops
from effinfer.ops.shared import arrays

TORCH = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.float8_e5m2: "float8_e5m2",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.bool: "bool",
}
ML_DTYPES = ["bfloat16", "float8_e4m3fn", "float8_e5m2"]
TAGS = {
    "bfloat16": ops.bfloat16,
    "float8_e4m3fn": ops.float8_e4m3fn,
    "float8_e5m2": ops.float8_e5m2,
}


def pointer(array):
    return array.__array_interface__["data"][0]


def torch_values(dtype, *shape):
    return torch.arange(int(np.prod(shape))).reshape(shape).to(dtype)


@pytest.mark.parametrize("dtype", TORCH, ids=str)
def test_torch_goes_in_as_it_lies_and_comes_out_as_torch(dtype):
    tensor = torch_values(dtype, 4, 6)
    array = arrays.view(tensor, "[op] x")
    assert arrays.dtype_name(array.dtype) == TORCH[dtype]
    assert pointer(array) == tensor.data_ptr()
    raw = tensor.view(torch.uint8).numpy()
    np.testing.assert_array_equal(np.ascontiguousarray(array).view(np.uint8), raw)
    result, memory = arrays.empty(tensor, (2, 3))
    assert isinstance(result, torch.Tensor)
    assert result.dtype == dtype
    assert pointer(memory) == result.data_ptr()
    assert memory.shape == (2, 3)
    assert memory.flags.writeable


@pytest.mark.parametrize("name", ML_DTYPES)
def test_ml_dtypes_stay_ml_dtypes(name):
    x = np.arange(6).reshape(2, 3).astype(getattr(ml_dtypes, name))
    array = arrays.view(x.T, "[op] x")
    assert arrays.dtype_name(array.dtype) == name
    assert pointer(array) == pointer(x)
    assert array.shape == (3, 2)
    for dtype in (None, TAGS[name]):
        result, memory = arrays.empty(x, (5,), dtype)
        assert result.dtype == x.dtype
        assert pointer(memory) == pointer(result)
    other, _ = arrays.empty(x, (5,), np.float32)
    assert other.dtype == np.float32


@pytest.mark.parametrize("name", ML_DTYPES)
def test_tags_are_views_of_integers(name):
    tag = TAGS[name]
    bits = np.arange(24, dtype=np.uint8).view(np.dtype(tag.str)).reshape(4, -1)
    array = arrays.view(bits.view(tag), "[op] x")
    assert pointer(array) == pointer(bits)
    for kept in (array, array.T, array[1:, ::2], array.copy(), arrays.dense(array.T, "[op] x")):
        assert arrays.dtype_name(kept.dtype) == name
    assert arrays.dtype_name(bits.dtype) == tag.base.name
    result, memory = arrays.empty(array, (2,))
    assert arrays.dtype_name(result.dtype) == name
    assert result is memory
    assert arrays.empty(torch.zeros(1), (2,), tag)[0].dtype == getattr(torch, name)


def test_numpy_is_itself():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert arrays.view(x, "[op] x") is x
    assert arrays.dense(x, "[op] x") is x
    assert arrays.writable(x, "[op] x") is x
    assert arrays.optional(None, "[op] x") is None


def test_strides_are_kept_by_view_and_copied_by_dense():
    tensor = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    for part in (tensor[:, 1:4], tensor.T, tensor[::2], tensor[:, ::3], tensor[1:1]):
        array = arrays.view(part, "[op] x")
        np.testing.assert_array_equal(array, part.numpy())
        if part.numel():
            assert pointer(array) == part.data_ptr()
        copy = arrays.dense(part, "[op] x")
        assert copy.flags.c_contiguous
        np.testing.assert_array_equal(copy, array)
    expanded = torch.ones(3, 1).expand(3, 5)
    assert arrays.view(expanded, "[op] x").strides == (4, 0)


def test_unaligned_arrays_are_copied_by_dense_only():
    raw = np.zeros(9, np.uint8)[1:].view(np.float32)
    if raw.flags.aligned:
        raw = np.zeros(10, np.uint8)[2:].view(np.float32)
    assert arrays.dense(raw, "[op] x").flags.aligned
    with pytest.raises(InvalidArgumentError, match=r"\[op\] x: expected a C-contiguous array"):
        arrays.writable(raw, "[op] x")
    with pytest.raises(InvalidArgumentError, match=r"\[silu\] x: expected aligned"):
        _core.silu(raw)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)])
def test_scalars_and_empty_arrays(shape):
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.zeros(shape, dtype=dtype)
        array = arrays.view(tensor, "[op] x")
        assert array.shape == shape
        assert arrays.dense(tensor, "[op] x").shape == shape
        assert arrays.empty(tensor, shape)[1].shape == shape


def test_read_only_arrays_are_read_and_not_written():
    x = np.arange(4, dtype=np.float32)
    x.flags.writeable = False
    assert arrays.view(x, "[op] x") is x
    for check in (arrays.writable, arrays.writable_view):
        with pytest.raises(InvalidArgumentError, match=r"\[op\] out: expected a writable array"):
            check(x, "[op] out")
    # numpy exports what is read-only as such.
    shared = arrays.view(Producer(x), "[op] x")
    assert pointer(shared) == pointer(x)
    assert not shared.flags.writeable
    with pytest.raises(InvalidArgumentError, match=r"expected a C-contiguous array, got shape"):
        arrays.writable(np.zeros((4, 4), np.float32).T[1:], "[op] out")


class Producer:
    """Exports an array through DLPack, as a library that numpy knows nothing of."""

    def __init__(self, array, device=(1, 0), versioned=True):
        self.array = array
        self.device = device
        self.versioned = versioned
        self.dtype = array.dtype

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **kwargs):
        if not self.versioned and kwargs:
            raise TypeError("unexpected keyword argument")
        return self.array.__dlpack__(**kwargs)

    def __array_namespace__(self):
        return Namespace


class Namespace:
    float32 = np.float32

    @staticmethod
    def empty(shape, dtype):
        return Producer(np.empty(shape, dtype))

    @staticmethod
    def from_dlpack(x):
        return Producer(x)


@pytest.mark.parametrize("versioned", [True, False])
def test_any_producer(versioned):
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    producer = Producer(x[:, ::2], versioned=versioned)
    array = arrays.view(producer, "[op] x")
    assert pointer(array) == pointer(x)
    np.testing.assert_array_equal(array, x[:, ::2])
    result, memory = arrays.empty(producer, (2, 5))
    assert isinstance(result, Producer)
    assert pointer(memory) == pointer(result.array)
    silu = ops.silu(producer)
    assert isinstance(silu, Producer)
    np.testing.assert_array_equal(silu.array, ops.silu(x[:, ::2]))


@pytest.mark.parametrize("make", [Producer, lambda x: Producer(x, versioned=False), lambda x: x])
def test_memory_lives_as_long_as_its_view(make):
    class Owner(np.ndarray):
        pass

    owner = np.arange(1000, dtype=np.float32).view(Owner)
    alive = weakref.ref(owner)
    array = arrays.view(make(owner), "[op] x")
    part = array[10:20]
    del owner, array
    gc.collect()
    assert alive() is not None
    np.testing.assert_array_equal(part, np.arange(10, 20, dtype=np.float32))
    del part
    gc.collect()
    assert alive() is None


def test_torch_memory_outlives_the_tensor():
    tensor = torch.full((1 << 16,), 3.0)
    array = arrays.view(tensor, "[op] x")
    del tensor
    torch.full((1 << 16,), 4.0)
    assert (array == 3.0).all()


def test_a_used_capsule_is_refused():
    x = np.arange(4, dtype=np.float32)
    capsule = x.__dlpack__(max_version=(1, 0))

    class Once:
        def __dlpack__(self, **kwargs):
            return capsule

    first = arrays.view(Once(), "[op] x")
    with pytest.raises(InvalidArgumentError, match=r"\[op\] x: expected a DLPack capsule"):
        arrays.view(Once(), "[op] x")
    np.testing.assert_array_equal(first, x)
    name = ctypes.pythonapi.PyCapsule_GetName
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    assert name(capsule) == b"used_dltensor_versioned"


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ([1.0, 2.0], "expected a numpy array, a torch tensor or another array.*got list"),
        (None, "got NoneType"),
        (torch.zeros(2, requires_grad=True), r"expected an array that can be shared.*detach\(\)"),
        (torch.zeros(2, dtype=torch.complex64), "expected float32.*got DLPack type 5 of 64 bits"),
        (torch.zeros(2, dtype=torch.float64), "expected float32.*got DLPack type 2 of 64 bits"),
        (torch.zeros(2, device="meta"), 'expected "cpu", got "meta"'),
        (Producer(np.zeros(2), device=(2, 0)), 'expected "cpu", got "cuda:0"; CUDA: '),
        (Producer(np.zeros(2), device=(99, 1)), 'expected "cpu", got "DLPack device 99:1"'),
        (Producer(np.zeros(2, np.int16)), "expected float32.*got DLPack type 0 of 16 bits"),
    ],
)
def test_what_is_refused(x, message):
    with pytest.raises(InvalidArgumentError, match=r"^\[op\] x: .*" + message):
        arrays.view(x, "[op] x")


def test_operators_refuse_elements_that_they_do_not_know():
    for dtype in (np.float64, np.dtype(">f4"), np.uint16, "datetime64[s]"):
        with pytest.raises(InvalidArgumentError, match=r"\[silu\] x: expected float32.*got"):
            ops.silu(np.zeros(3, dtype))
    for x in (torch.zeros(3, dtype=torch.bfloat16), np.zeros(3, ml_dtypes.bfloat16)):
        with pytest.raises(InvalidArgumentError, match=r"\[silu\] x: expected dtype f32, got bf16"):
            ops.silu(x)


def test_operators_return_the_kind_that_they_are_given():
    x = torch.randn(3, 5)
    out = ops.softcap(x, 5.0)
    assert isinstance(out, torch.Tensor)
    np.testing.assert_array_equal(out.numpy(), ops.softcap(x.numpy(), 5.0))


def test_bfloat16_tables(isa):
    table = torch.randn(6, 4).to(torch.bfloat16)
    ids = torch.tensor([5, 0, 3], dtype=torch.int32)
    expected = table[ids.long()].float().numpy()
    np.testing.assert_array_equal(ops.embedding(ids, table).numpy(), expected)
    tagged = arrays.view(table, "[op] table")
    np.testing.assert_array_equal(ops.embedding(ids.numpy(), tagged), expected)
    np.testing.assert_array_equal(ops.pack(table).unpack(), table.float().numpy())


def test_out_is_checked():
    x = np.zeros((2, 3), np.float32)
    out = np.ones((2, 3), np.float32)
    result, memory = arrays.result(x, (2, 3), None, out, "[op] out")
    assert result is out
    assert memory is out
    for bad in (np.ones((3, 2), np.float32), np.ones((2, 3), np.float16)):
        with pytest.raises(InvalidArgumentError, match=r"\[op\] out: expected float32 \(2, 3\), g"):
            arrays.result(x, (2, 3), None, bad, "[op] out")

"""Arrays on a GPU, in and out: DLPack, lifetimes, streams, views; what is refused."""

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest

import effinfer
from effinfer import DeviceArray, InvalidArgumentError, Queue, UnsupportedError, _core, ops
from tests.ops.cuda.gpu_arrays import TYPES, Producer, here, stream, there

X = np.random.default_rng(0).standard_normal((6, 32), np.float32)
WEIGHT = np.random.default_rng(1).standard_normal(32, np.float32)
EXPECTED = ops.rmsnorm(X, WEIGHT)


def close(actual, expected=EXPECTED):
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint8", "int32", "int64", *TYPES])
def test_copies_there_and_back(dtype):
    x = (
        np.arange(24).reshape(
            (
                2,
                3,
                4,
            )
        )
        % 7
    ).astype(TYPES.get(dtype, dtype))
    array = there(x)
    assert array.device == "cuda:0"
    assert array.shape == x.shape
    assert array.strides == x.strides
    assert array.dtype.itemsize == array.itemsize == x.itemsize
    np.testing.assert_array_equal(here(array).view(np.uint8), x.view(np.uint8))
    assert here(array).dtype == x.dtype
    bool_array = there(np.array([True, False]))
    np.testing.assert_array_equal(here(bool_array), [1, 0])


@pytest.mark.parametrize(
    "index",
    [
        0, -1, (1, 2), slice(1, None), slice(None, None, -1), (slice(None), None, slice(0, 2)),
        (Ellipsis, 1), (slice(None), slice(2, 0, -1), slice(1, None, 2)), (None, Ellipsis),
        slice(3, 1), (1, 2, 3),
    ],
)  # fmt: skip
def test_views_are_numpys(index):
    x = np.arange(24, dtype=np.float32).reshape(
        (
            2,
            3,
            4,
        )
    )
    view = there(x)[index]
    assert view.shape == x[index].shape
    np.testing.assert_array_equal(here(view), x[index])


def test_reshapes_without_a_copy():
    x = np.arange(120, dtype=np.float32).reshape(
        (
            4,
            5,
            6,
        )
    )
    array = there(x)
    np.testing.assert_array_equal(
        here(
            array.reshape(
                (
                    20,
                    2,
                    3,
                )
            )
        ),
        x.reshape(
            (
                20,
                2,
                3,
            )
        ),
    )
    rows = array[1::2]
    np.testing.assert_array_equal(
        here(
            rows.reshape(
                (
                    2,
                    30,
                )
            )
        ),
        x[1::2].reshape(
            (
                2,
                30,
            )
        ),
    )
    np.testing.assert_array_equal(
        here(
            rows.reshape(
                (
                    2,
                    5,
                    2,
                    3,
                )
            )
        ),
        x[1::2].reshape(
            (
                2,
                5,
                2,
                3,
            )
        ),
    )
    np.testing.assert_array_equal(here(array.swapaxes(0, 2)), x.swapaxes(0, 2))
    assert array[:, :, :0].reshape(
        (
            0,
            7,
        )
    ).shape == (0, 7)
    for bad, why in (((7, 7), "as many elements"), ((72,), "dense")):
        with pytest.raises(InvalidArgumentError, match=why):
            (array[:, ::2] if why == "dense" else array).reshape(bad)
    for bad in ((0, 0, 0, 0), 9, "x", 2.5):
        with pytest.raises(IndexError):
            array[bad]


@pytest.mark.parametrize("versioned", [True, False])
def test_any_producer_is_read_where_it_lies_and_released_once(versioned):
    producer, weight = Producer(X, versioned=versioned), there(WEIGHT)
    out = ops.rmsnorm(producer, weight)
    assert isinstance(out, DeviceArray)
    close(here(out))
    gc.collect()
    assert producer.exported > 0
    assert producer.deleted == producer.exported
    assert set(producer.streams) == {1}  # the legacy default stream


def test_memory_lives_until_the_stream_has_run():
    queue = Queue("cuda:0", stream(7))
    x, weight = there(X), there(WEIGHT)
    out = ops.rmsnorm(x, weight, pool=queue)
    part = out[2:4]
    del x, weight, out
    gc.collect()
    there(np.zeros((6, 32), np.float32))
    assert part.stream == queue.stream
    close(here(part), EXPECTED[2:4])


def test_a_view_keeps_its_producer():
    producer = Producer(X)
    view = _core.from_dlpack(producer, "[op] x")[1:]
    alive = weakref.ref(producer.array)
    assert producer.deleted == 0
    close(here(view), X[1:])
    del view
    gc.collect()
    assert producer.deleted == 1
    assert alive() is not None


def test_work_waits_for_nobody_and_keeps_the_order_of_its_stream():
    first, second = Queue("cuda:0", stream(11)), Queue("cuda:0", stream(12))
    x, weight = there(X), there(WEIGHT)
    a = ops.rmsnorm(x, weight, pool=first)
    b = ops.silu(a, pool=first)  # reads what has not run yet
    second.synchronize()
    close(here(b), ops.silu(EXPECTED))
    # Another stream runs behind, where the array's consumer asks for it.
    a = ops.rmsnorm(x, weight, pool=first)
    behind = _core.from_dlpack(a, "[op] x", second.stream)
    assert behind.stream == second.stream
    close(here(ops.silu(behind, pool=second)), ops.silu(EXPECTED))


def test_exports():
    array = there(X)[:, 2:]
    assert array.__dlpack_device__() == (2, 0)
    for version in (None, (0, 8), (1, 0), (1, 3)):
        again = Capsule(array, version)
        view = _core.from_dlpack(again, "[op] x")
        assert view.shape == (6, 30)
        np.testing.assert_array_equal(here(view), X[:, 2:])
    with pytest.raises(BufferError, match="another device"):
        array.__dlpack__(dl_device=(1, 0))
    with pytest.raises(BufferError, match="copies"):
        array.__dlpack__(copy=True)
    interface = array.__cuda_array_interface__
    assert interface["shape"] == (6, 30)
    assert interface["strides"] == (128, 4)
    assert interface["typestr"] == "<f4"
    assert interface["stream"] == 1
    assert not hasattr(there(X.astype(ml_dtypes.bfloat16)), "__cuda_array_interface__")
    # A capsule that nobody takes gives its array back.
    alive = weakref.ref(there(X))
    assert alive() is None


class Capsule:
    def __init__(self, array, version):
        self.array, self.version = array, version

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream=None, max_version=None):
        return self.array.__dlpack__(stream=stream, max_version=self.version)


def test_out_is_written_and_checked():
    x, weight = there(X), there(WEIGHT)
    out = there(np.zeros_like(X))
    assert ops.rmsnorm(x, weight, out=out) is out
    close(here(out))
    producer = Producer(np.zeros_like(X))
    assert ops.rmsnorm(x, weight, out=producer) is producer
    close(here(producer.array))
    for bad, message in (
        (there(np.zeros((6, 16), np.float32)), r"expected float32 \(6, 32\), got"),
        (there(np.zeros((6, 32), np.float16)), r"expected float32 \(6, 32\), got float16"),
        (there(np.zeros((6, 64), np.float32))[:, ::2], "expected a C-contiguous array"),
        (Producer(X, flags=1), "expected a writable array"),
        (np.zeros_like(X), "expected a tensor on cuda:0, got one on cpu"),
    ):
        with pytest.raises(InvalidArgumentError, match=r"^\[rmsnorm\] out: .*" + message):
            ops.rmsnorm(x, weight, out=bad)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, w: ops.rmsnorm(x, WEIGHT), InvalidArgumentError,
         r"\[rmsnorm\] weight: expected a tensor on cuda:0, got one on cpu"),
        (lambda x, w: ops.rmsnorm(X, w), UnsupportedError,
         r"\[rmsnorm\] weight: expected an array on cpu.*got one on cuda:0"),
        (lambda x, w: ops.rmsnorm(X, Producer(WEIGHT)), UnsupportedError,
         r"\[rmsnorm\] weight: expected an array on cpu.*got one on cuda:0"),
        (lambda x, w: ops.rmsnorm(x, w, pool=ops.ThreadPool(1)), InvalidArgumentError,
         r"\[rmsnorm\] pool: expected None or a Queue on cuda:0, got a ThreadPool"),
        (lambda x, w: ops.rmsnorm(X, WEIGHT, pool=Queue()), InvalidArgumentError,
         r"\[rmsnorm\] input: expected a tensor on cuda:0, got one on cpu"),
        (lambda x, w: ops.a_shape_index(x, x, 2, 1), InvalidArgumentError,
         r"\[a_shape_index\] qo_indptr: expected int32 or int64, got float32"),
        (lambda x, w: ops.attention_scores(x[:, None], X[:, None]), InvalidArgumentError,
         r"\[attention_scores\] k: expected a tensor on cuda:0, got one on cpu"),
        (lambda x, w: ops.rmsnorm(Producer(X, device=(2, 7)), w), InvalidArgumentError,
         r'\[rmsnorm\] input: expected "cpu", "cuda:0", got "cuda:7"'),
        (lambda x, w: ops.rmsnorm(x, Producer(WEIGHT, device=(2, 7))), InvalidArgumentError,
         r'\[rmsnorm\] weight: expected "cpu", "cuda:0", got "cuda:7"'),
        (lambda x, w: ops.rmsnorm(Producer(X, device=(10, 0)), w), InvalidArgumentError,
         r'\[rmsnorm\] input: expected "cpu", "cuda:0", got "rocm:0"'),
        (lambda x, w: ops.rmsnorm(Producer(X, code=5, bits=32), w), InvalidArgumentError,
         r"\[rmsnorm\] input: expected float32.*got DLPack type 5"),
        (lambda x, w: ops.rmsnorm(there(X.astype(np.int32)), w), InvalidArgumentError,
         r"\[rmsnorm\] input: expected dtype f32, f16 or bf16, got i32"),
        (lambda x, w: ops.rmsnorm(x[:, ::2], w[:16]), InvalidArgumentError,
         r"\[rmsnorm\] input: expected a contiguous last dimension, got a stride of 2"),
        (lambda x, w: ops.rmsnorm(x[:, :16], w[::2]), InvalidArgumentError,
         r"\[rmsnorm\] weight: expected a C-contiguous array, got strides"),
        (lambda x, w: ops.fused_add_rmsnorm(x, Producer(X, flags=1), w), InvalidArgumentError,
         r"\[fused_add_rmsnorm\] residual: expected a writable array"),
        (lambda x, w: Queue("cuda:3"), InvalidArgumentError, 'expected "cpu", "cuda:0", got "cud'),
        (lambda x, w: Queue("cpu"), InvalidArgumentError, 'expected a GPU, got "cpu"'),
        (lambda x, w: there(X, "cpu"), InvalidArgumentError, 'expected a GPU, got "cpu"'),
    ],
)  # fmt: skip
def test_what_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(there(X), there(WEIGHT))


def test_queues_write_arrays():
    queue, array = Queue("cuda:0", stream(13)), there(X)
    rows = np.arange(64, dtype=np.float32).reshape(2, 32)
    queue.upload(array[:2], rows)
    queue.zero(array[4:])
    queue.synchronize()
    np.testing.assert_array_equal(here(array), np.concatenate([rows, X[2:4], np.zeros((2, 32))]))
    for call in (
        lambda: queue.upload(array, rows),
        lambda: queue.upload(array[:2], rows.astype(np.float16)),
        lambda: queue.upload(array[:2, ::2], np.zeros((2, 16), np.float32)),
        lambda: queue.zero(array[:, 1:]),
    ):
        with pytest.raises(InvalidArgumentError, match="expected a writable C-contiguous array"):
            call()


def test_names():
    assert effinfer.DeviceArray is DeviceArray
    assert Queue("cuda").device == "cuda:0"
    assert Queue(stream=5).stream == 5

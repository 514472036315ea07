"""What plans take beside their lists, and CuPy's arrays, on a GPU."""

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from effinfer import DeviceArray, Queue, ops
from tests.ops.batches import Paged, Shape, offsets, values_of
from tests.ops.cuda.gpu_arrays import here, stream, there
from tests.ops.reference import assert_attention
from tests.ops.test_multi_item import SHAPES, arrays, scored

STREAM = stream(33)


def check(out, lse, expected, dtype):
    options = {"dtype": dtype, "bf16_products": True}
    assert_attention(values_of(out.to_numpy(), dtype), lse.to_numpy(), expected, **options)


@pytest.mark.parametrize("q_len", [1, 3])
def test_rows_of_each_sequence_and_splits(q_len):
    dtype, rows = "bfloat16", [q_len] * 3
    batch = Paged(np.random.default_rng(1), [3, 70, 600], 16, Shape(4, 2, 64), dtype)
    q, cache = there(batch.queries(rows, dtype)), tuple(there(x) for x in batch.cache)
    wrapper = ops.BatchDecodeWithPagedKVCacheWrapper()
    given = (*batch.lists, 4, 2, 64, 16)
    wrapper.plan(*given, q_len_per_req=q_len)
    out, lse = wrapper.run_return_lse(q, cache)
    expected = batch.expected(here(q).view(ops.bfloat16), rows, dtype, causal=True)
    check(out, lse, expected, dtype)
    for splits in ({"fixed_split_size": 64}, {"disable_split_kv": True}):
        wrapper.plan(*given, q_len_per_req=q_len, **splits)
        np.testing.assert_array_equal(wrapper.run(q, cache).to_numpy(), out.to_numpy())


def test_several_items_after_one_prefix():
    dtype = "bfloat16"
    made = [scored(*shape) for shape in SHAPES]
    rows = [shape[2] for shape in SHAPES]
    lengths = [mask.shape[1] for mask, _ in made]
    batch = Paged(np.random.default_rng(2), lengths, 16, Shape(4, 2, 64), dtype)
    wrapper = ops.BatchPrefillWithPagedKVCacheWrapper()
    given = arrays(140, [s[0] for s in SHAPES], [p for _, p in made], [max(p) for _, p in made])
    wrapper.plan(offsets(rows), *batch.lists, 4, 2, 64, 16, causal=True, **given)
    q = batch.queries(rows, dtype)
    out, lse = wrapper.run(there(q), tuple(there(x) for x in batch.cache), return_lse=True)
    check(out, lse, batch.expected(q, rows, dtype, masks=[mask for mask, _ in made]), dtype)


class CupyArray:
    """What effinfer asks of CuPy's, over a DeviceArray: the emulator has no CuPy."""

    def __init__(self, array):
        self.array = array

    dtype = property(lambda self: self.array.dtype)
    shape = property(lambda self: self.array.shape)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)


def test_arrays_of_cupy_in_its_current_stream(monkeypatch):
    streams = []

    def stream():
        streams.append(STREAM)
        return SimpleNamespace(ptr=STREAM)

    def empty(shape, dtype):
        return CupyArray(DeviceArray.empty(list(shape), np.dtype(dtype), Queue("cuda:0", STREAM)))

    cuda = SimpleNamespace(Device=lambda index: nullcontext(), get_current_stream=stream)
    module = SimpleNamespace(ndarray=CupyArray, cuda=cuda, empty=empty)
    monkeypatch.setitem(sys.modules, "cupy", module)
    rng = np.random.default_rng(3)
    x, weight = rng.standard_normal((5, 64), np.float32), rng.standard_normal(64, np.float32)
    out = ops.rmsnorm(CupyArray(there(x)), CupyArray(there(weight)))
    assert isinstance(out, CupyArray)
    assert streams
    Queue("cuda:0", STREAM).synchronize()
    np.testing.assert_allclose(out.array.to_numpy(), ops.rmsnorm(x, weight), rtol=1e-5, atol=1e-6)

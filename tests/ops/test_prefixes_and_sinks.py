"""Attention with a shared prefix, and with a sink in every softmax, against float64."""

import numpy as np
import pytest
import torch

from effinfer import InvalidArgumentError, ops
from tests.ops.batches import Paged, Shape, as_torch, offsets, values_of
from tests.ops.reference import assert_attention, attend, join, seen
from tests.ops.test_decode import bf16_products
from tests.ops.test_flashinfer_plans import HEADS, batch_of, i32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sinks_by_position(isa, dtype):
    batch = batch_of(9, kv_dtype=dtype)
    rows = [2, 3, 0, 9]
    sinks = np.array([0.5, -2.0, 6.0, 0.0], np.float32)
    wrapper = ops.BatchAttentionWithAttentionSinkWrapper(
        None, q_data_type=getattr(torch, dtype), head_dim_qk=64, head_dim_vo=64, window_left=10
    )
    wrapper.plan(offsets(rows), *batch.lists, *HEADS, 16, causal=True, window_left=10)
    q = batch.queries(rows, dtype)
    out, lse = wrapper.run(as_torch(q, dtype), batch.cache, sinks, 0.3, return_lse=True)
    options = {"causal": True, "window_left": 10, "sm_scale": 0.3, "sinks": sinks}
    expected = batch.expected(q, rows, dtype, **options)
    assert_attention(
        out.double().numpy(),
        lse.numpy(),
        expected,
        dtype=dtype,
        bf16_products=bf16_products(dtype, dtype),
    )


def test_errors_of_sinks():
    lists = (i32(0, 1), i32(0, 1), i32(0), i32(5))
    make = ops.BatchAttentionWithAttentionSinkWrapper
    for options, plan, message in (
        ({"head_dim_qk": 128}, {}, "head_dim_qk: expected 128, of the constructor, got 64"),
        ({"window_left": 5}, {}, "window_left: expected 5, of the constructor, got -1"),
        ({"q_data_type": "float16"}, {"q_data_type": "float32"}, "q_data_type: expected float16"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            make(None, **options).plan(*lists, *HEADS, 16, **plan)
    wrapper = make(None, q_data_type=torch.float16)
    wrapper.plan(*lists, *HEADS, 16)
    cache = np.zeros((1, 2, 16, 2, 64), np.float32)
    with pytest.raises(InvalidArgumentError, match="q: expected float16"):
        wrapper.run(np.zeros((1, 4, 64), np.float32), cache)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_shared_prefixes(isa, layout, dtype):
    batch = batch_of(10, [5, 0, 64, 30], kv_dtype=dtype, layout=layout)
    prefix = Paged(np.random.default_rng(11), [50], 50, Shape(*HEADS), dtype)
    pages = [x[prefix.kv_indices[0]] for x in prefix.cache]
    shared = pages if layout == "NHD" else [np.ascontiguousarray(x.swapaxes(0, 1)) for x in pages]
    shared = [x.view(pages[0].dtype) for x in shared]
    options = {"dtype": dtype, "bf16_products": bf16_products(dtype, dtype), "roundings": 3}

    def expected(q, rows, causal, **scores):
        starts, exact = offsets(rows), values_of(q, dtype)
        parts = []
        for s, n in enumerate(rows):
            own = seen(n, batch.kv_lens[s], causal)
            mask = np.concatenate([np.ones((n, 50), bool), own], axis=1)
            keys = np.concatenate([prefix.keys[0], batch.keys[s]])
            values = np.concatenate([prefix.values[0], batch.values[s]])
            parts.append(attend(exact[starts[s] : starts[s + 1]], keys, values, mask, **scores))
        return join(parts)

    decoding = ops.BatchDecodeWithSharedPrefixPagedKVCacheWrapper(None, layout)
    decoding.reset_workspace_buffer(None, None)
    decoding.begin_forward(*batch.lists, *HEADS, 16)
    q = batch.queries([1] * 4, dtype)
    out = decoding.forward(q, *shared, batch.cache)
    assert out.dtype == q.dtype
    assert_attention(values_of(out, dtype), None, expected(q, [1] * 4, False), **options)

    rows = [3, 1, 0, 30]
    prefill = ops.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(None, layout)
    prefill.begin_forward(offsets(rows), *batch.lists, *HEADS, 16)
    q = batch.queries(rows, dtype)
    for causal in (False, True, False):
        out = prefill.forward(q, *shared, batch.cache, causal, False, 0.2)
        assert_attention(
            values_of(out, dtype), None, expected(q, rows, causal, sm_scale=0.2), **options
        )


def test_errors_of_shared_prefixes():
    decoding = ops.BatchDecodeWithSharedPrefixPagedKVCacheWrapper()
    q, shared = np.zeros((1, 4, 64), np.float32), np.zeros((3, 2, 64), np.float32)
    cache = np.zeros((1, 2, 16, 2, 64), np.float32)
    op = r"^\[batch_decode_with_shared_prefix\] "
    with pytest.raises(InvalidArgumentError, match=op + r"run: expected plan\(\)"):
        decoding.forward(q, shared, shared, cache)
    with pytest.raises(InvalidArgumentError, match=op + "indptr: expected 0 first"):
        decoding.begin_forward(i32(1, 2), i32(0), i32(1), *HEADS, 16)
    decoding.begin_forward(i32(0, 1), i32(0), i32(1), *HEADS, 16, "float16")
    with pytest.raises(InvalidArgumentError, match=op + "q: expected float16"):
        decoding.forward(q, shared, shared, cache)
    decoding.begin_forward(i32(0, 1), i32(0), i32(1), *HEADS, 16)
    with pytest.raises(InvalidArgumentError, match=op + "v: expected shape"):
        decoding.forward(q, shared, shared[:2], cache)
    op = r"^\[batch_prefill_with_shared_prefix\] "
    prefill = ops.BatchPrefillWithSharedPrefixPagedKVCacheWrapper()
    with pytest.raises(InvalidArgumentError, match=op + r"run: expected plan\(\)"):
        prefill.forward(q, shared, shared, cache)
    with pytest.raises(InvalidArgumentError, match=op + "kv_layout: expected NHD or HND"):
        ops.BatchPrefillWithSharedPrefixPagedKVCacheWrapper(None, "DHN")

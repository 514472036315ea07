"""Wrappers with buffers of fixed sizes: plan() fills them, and every batch has their size."""

import numpy as np
import pytest
import torch

from effinfer import InvalidArgumentError, ops
from tests.ops.batches import Paged, Shape, offsets
from tests.ops.test_prefill import pack

HEADS = (4, 2, 64)


def i32(*values):
    return np.array(values, np.int32)


def full(count, dtype=np.int32):
    return np.full(count, 77, dtype)


def batch_of(seed, kv_lens):
    return Paged(np.random.default_rng(seed), kv_lens, 16, Shape(*HEADS))


def test_decode_fills_its_buffers(isa):
    buffers = [torch.full((n,), 77, dtype=torch.int32) for n in (4, 40, 3)]
    fixed = ops.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(None, *buffers)
    assert fixed.is_cuda_graph_enabled
    for seed, lengths in enumerate(([5, 16, 300], [80, 0, 1])):
        batch = batch_of(seed, lengths)
        plain = ops.BatchDecodeWithPagedKVCacheWrapper()
        q = batch.queries([1] * 3)
        for wrapper in (plain, fixed):
            wrapper.plan(*batch.lists, *HEADS, 16)
        np.testing.assert_array_equal(fixed.run(q, batch.cache), plain.run(q, batch.cache))
        for buffer, values in zip(buffers, batch.lists, strict=True):
            np.testing.assert_array_equal(buffer[: values.size].numpy(), values)
    assert buffers[1][39] == 77
    # The buffers themselves may be the lists of a plan.
    indptr, indices, last = buffers
    ops.fast_decode_plan(fixed, indptr, indices, last, *HEADS, 16)
    np.testing.assert_array_equal(fixed.run(q, batch.cache), plain.run(q, batch.cache))


@pytest.mark.parametrize("masked", [False, True])
def test_prefill_fills_its_buffers(isa, masked):
    names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf")
    buffers = {name: full(n) for name, n in zip(names, (4, 4, 40), strict=True)}
    buffers["paged_kv_last_page_len_buf"] = full(3)
    masks = {"custom_mask_buf": full(900, np.uint8), "mask_indptr_buf": full(4)}
    fixed = ops.BatchPrefillWithPagedKVCacheWrapper(
        None, "NHD", True, *buffers.values(), *(masks.values() if masked else ())
    )
    plain = ops.BatchPrefillWithPagedKVCacheWrapper()
    for seed, rows in enumerate(([3, 1, 7], [2, 2, 2])):
        batch = batch_of(seed, [20, 5, 300])
        options = {"causal": True}
        if masked:
            rng = np.random.default_rng(seed)
            each = [rng.random((n, m)) < 0.7 for n, m in zip(rows, batch.kv_lens, strict=True)]
            options = {"custom_mask": np.concatenate([x.reshape(-1) for x in each])}
        for wrapper in (plain, fixed):
            wrapper.plan(offsets(rows), *batch.lists, *HEADS, 16, **options)
        q = batch.queries(rows)
        np.testing.assert_array_equal(fixed.run(q, batch.cache), plain.run(q, batch.cache))
        lists = (offsets(rows), *batch.lists)
        for buffer, values in zip(buffers.values(), lists, strict=True):
            np.testing.assert_array_equal(buffer[: values.size], values)
        if masked:
            bits = pack(each)
            np.testing.assert_array_equal(masks["custom_mask_buf"][: bits.size], bits)
            starts = offsets([-(-x.size // 8) for x in each])
            np.testing.assert_array_equal(masks["mask_indptr_buf"], starts)
    options = {"custom_mask": np.ones(2465, bool)} if masked else {}
    with pytest.raises(InvalidArgumentError, match="plan: expected at most 11 query rows"):
        fixed.plan(offsets([3, 1, 8]), *batch.lists, *HEADS, 16, **options)
    other = {} if masked else {"custom_mask": np.ones(40, bool)}
    with pytest.raises(InvalidArgumentError, match="custom_mask: expected"):
        fixed.plan(offsets([2, 0, 0]), *batch.lists, *HEADS, 16, **other)


def test_ragged_fills_its_buffers(isa):
    rows, keys = full(3), full(3)
    fixed = ops.BatchPrefillWithRaggedKVCacheWrapper(None, "NHD", True, rows, keys)
    fixed.plan(i32(0, 2, 5), i32(0, 9, 14), *HEADS)
    np.testing.assert_array_equal(rows, [0, 2, 5])
    np.testing.assert_array_equal(keys, [0, 9, 14])


def test_cascades_fill_their_buffers(isa):
    batch = batch_of(4, [40, 3, 9])
    pages = np.split(batch.kv_indices, batch.kv_indptr[1:-1])
    lists = [
        [i32(0, 2), i32(0, 1, 2)],
        [offsets([len(pages[0])]), offsets([len(p) for p in pages[1:]])],
        [pages[0], np.concatenate(pages[1:])],
        [batch.last_page_len[:1], batch.last_page_len[1:]],
    ]
    buffers = [[full(x.size) for x in each] for each in lists]
    fixed = ops.MultiLevelCascadeAttentionWrapper(2, None, "NHD", True, *buffers)
    plain = ops.MultiLevelCascadeAttentionWrapper(2)
    assert fixed.is_cuda_graph_enabled and not plain.is_cuda_graph_enabled
    fixed.reset_workspace_buffer(None, None)
    for wrapper in (fixed, plain):
        wrapper.plan(*lists, *HEADS, 16)
    q = batch.queries([1, 1])
    np.testing.assert_array_equal(fixed.run(q, batch.cache), plain.run(q, batch.cache))
    for own, values in zip(buffers, lists, strict=True):
        for buffer, x in zip(own, values, strict=True):
            np.testing.assert_array_equal(buffer, x)
    with pytest.raises(InvalidArgumentError, match="qo_indptr_buf_arr: expected 2 buffers"):
        ops.MultiLevelCascadeAttentionWrapper(2, None, "NHD", True, buffers[0][:1])


def test_latent_attention_fills_its_buffers():
    buffers = [full(n) for n in (3, 3, 9, 2)]
    fixed = ops.BatchMLAPagedAttentionWrapper(None, True, *buffers)
    lists = (i32(0, 1, 2), i32(0, 1, 3), i32(0, 1, 2), i32(4, 5))
    fixed.plan(*lists, 2, 64, 16, 4, False, 1.0)
    for buffer, values in zip(buffers, lists, strict=True):
        np.testing.assert_array_equal(buffer[: values.size], values)
    with pytest.raises(InvalidArgumentError, match="expected 2 values, the size of kv_len_arr"):
        fixed.plan(i32(0, 1), i32(0, 1), i32(0), i32(4), 2, 64, 16, 4, False, 1.0)


def test_errors():
    make = ops.BatchDecodeWithPagedKVCacheWrapper
    buffers = full(4), full(5), full(3)
    for wrong, message in (
        ((None, full(5), full(3)), "paged_kv_indptr_buffer: expected an array with use_cuda_graph"),
        ((full(3), full(5), full(3)), "paged_kv_indptr_buffer: expected 4 values"),
        ((full(4), full(5), full(3, np.int64)), "paged_kv_last_page_len_buffer: expected int32"),
        ((full(4), full(5), full((3, 1))), "paged_kv_last_page_len_buffer: expected int32"),
        ((full(4), full(10)[::2], full(3)), "paged_kv_indices_buffer: expected a C-contiguous"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            make(None, "NHD", True, False, *wrong)
    fixed = make(None, "NHD", True, False, *buffers)
    with pytest.raises(InvalidArgumentError, match="plan: expected 3 values, the size of"):
        fixed.plan(i32(0, 1, 2), i32(0, 1), i32(5, 5), *HEADS, 16)
    lists = i32(0, 2, 4, 6), i32(0, 1, 2, 3, 4, 5), i32(5, 5, 5)
    with pytest.raises(InvalidArgumentError, match="at most 5 values for paged_kv_indices_buffer"):
        fixed.plan(*lists, *HEADS, 16)
    fixed.plan(i32(0, 1, 2, 3), lists[1], lists[2], *HEADS, 16, q_len_per_req=2)
    with pytest.raises(InvalidArgumentError, match="q_len_per_req: expected 2, the first plan's"):
        fixed.plan(i32(0, 1, 2, 3), lists[1], lists[2], *HEADS, 16)
    with pytest.raises(InvalidArgumentError, match="num_qo_heads"):
        fixed.plan(i32(0, 2, 3, 4), lists[1], lists[2], 3, 2, 64, 16, q_len_per_req=2)
    # A refused plan leaves the buffers as they were.
    np.testing.assert_array_equal(buffers[0], [0, 1, 2, 3])

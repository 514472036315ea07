"""Attention over lists of blocks and of trees of drafts on a GPU against float64."""

import numpy as np
import pytest

from effinfer import InvalidArgumentError, Queue, ops
from tests.ops.batches import Paged, Shape, offsets, values_of
from tests.ops.cuda.gpu_arrays import stream, there
from tests.ops.reference import assert_attention, attend, seen
from tests.ops.test_block_lists import random_matrix
from tests.ops.test_block_sparse import inputs, random_sizes
from tests.ops.test_tree import random_parents, tree_mask


def check(out, lse, expected, dtype, **options):
    assert_attention(
        values_of(out, dtype),
        lse,
        expected,
        dtype=dtype,
        bf16_products=dtype != "float32",
        **options,
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    ("R", "C", "rows", "columns", "dims"),
    [(1, 1, 9, 40, 64), (16, 16, 3, 20, 128), (5, 33, 7, 12, 64), (18, 65, 1, 3, 200)],
)
@pytest.mark.parametrize("causal", [False, True])
def test_blocks(dtype, R, C, rows, columns, dims, causal):
    rng = np.random.default_rng(R)
    block_map, indptr, indices = random_matrix(rng, rows, columns)
    M, N = rows * R, columns * C
    arrays, exact = inputs(rng, M, N, 4, 2, dims, dtype)
    wrapper = ops.BlockSparseAttentionWrapper()
    matrix = (there(indptr), there(indices)) if causal else (indptr, indices)
    wrapper.plan(*matrix, M, N, R, C, 4, 2, dims, causal=causal)
    out, lse = wrapper.run(*(there(x) for x in arrays), return_lse=True)
    assert out.device == "cuda:0"
    mask = np.repeat(np.repeat(block_map, R, 0), C, 1) & seen(M, N, causal)
    check(out.to_numpy(), lse.to_numpy(), attend(*exact, mask), dtype)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("R", "C"), [(3, 5), (18, 40)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_masks(on_device, R, C, dtype):
    rng = np.random.default_rng(C)
    _, indptr, indices = random_matrix(rng, 4, 8)
    M, N = 4 * R, 8 * C
    arrays, exact = inputs(rng, M, N, 3, 1, 64, dtype)
    blocks = rng.random((len(indices), R, C)) < 0.5
    mask = np.zeros((M, N), bool)
    for i in range(4):
        for b in range(indptr[i], indptr[i + 1]):
            j = indices[b]
            mask[i * R : (i + 1) * R, j * C : (j + 1) * C] = blocks[b]
    rows = [blocks[indptr[i] : indptr[i + 1]].swapaxes(0, 1).reshape(-1) for i in range(4)]
    bits = np.concatenate([np.packbits(row, bitorder="little") for row in rows])
    given = {"packed_mask": there(bits)} if on_device else {"mask": blocks}
    wrapper = ops.BlockSparseAttentionWrapper()
    wrapper.plan(indptr, indices, M, N, R, C, 3, 1, 64, logits_soft_cap=5.0, **given)
    x = [there(x) for x in arrays]
    out, lse = wrapper.run(*x, return_lse=True, lse_base="ln")
    expected = attend(*exact, mask, soft_cap=5.0)
    check(out.to_numpy(), lse.to_numpy(), expected, dtype, lse_base="ln")
    again = wrapper.run(*x, pool=Queue("cuda:0", stream(23)))
    np.testing.assert_array_equal(again.to_numpy(), out.to_numpy())


def test_all_blocks_have_the_bits_of_dense_attention():
    rng = np.random.default_rng(1)
    arrays, _ = inputs(rng, 8, 700, 2, 1, 64, "bfloat16")
    x = [there(x) for x in arrays]
    wrapper = ops.BlockSparseAttentionWrapper()
    indptr, indices = np.array([0, 7], np.int32), np.arange(7, dtype=np.int32)
    wrapper.plan(indptr, indices, 8, 700, 8, 100, 2, 1, 64, causal=True, sm_scale=0.2)
    dense = ops.single_prefill_with_kv_cache(*x, causal=True, sm_scale=0.2)
    np.testing.assert_array_equal(wrapper.run(*x).to_numpy(), dense.to_numpy())


@pytest.mark.parametrize("causal", [False, True])
def test_variable_blocks(causal):
    dtype = "float16"
    rng = np.random.default_rng(2)
    kv_heads, group, M, N = 3, 2, 40, 200
    rows, columns = random_sizes(rng, kv_heads, 4, M), random_sizes(rng, kv_heads, 9, N)
    block_map = rng.random((kv_heads, 4, 9)) < 0.5
    arrays, exact = inputs(rng, M, N, kv_heads * group, kv_heads, 64, dtype)
    wrapper = ops.VariableBlockSparseAttentionWrapper()
    heads = kv_heads * group, kv_heads, 64
    wrapper.plan(there(block_map), rows, there(columns), *heads, causal=causal)
    x = [there(x.swapaxes(0, 1)) for x in arrays]
    given = there(np.zeros((6, M, 64), np.float16)), there(np.zeros((6, M), np.float32))
    out, lse = wrapper.run(*x, *given, return_lse=True)
    assert (out, lse) == given
    masks = [np.repeat(np.repeat(block_map[h], columns[h], 1), rows[h], 0) for h in range(kv_heads)]
    mask = np.repeat(np.stack(masks), group, 0) & seen(M, N, causal)
    turned = np.ascontiguousarray(out.to_numpy().swapaxes(0, 1))
    check(turned, lse.to_numpy().T, attend(*exact, mask), dtype)
    np.testing.assert_array_equal(wrapper.run(*x).to_numpy(), out.to_numpy())


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_trees(layout):
    dtype, lengths, counts = "bfloat16", [1, 5, 9, 300], [1, 0, 9, 20]
    rng = np.random.default_rng(3)
    batch = Paged(rng, lengths, 16, Shape(6, 3, 64), dtype, layout)
    q = batch.queries(counts, dtype)
    trees = [random_parents(rng, n) for n in counts]
    lists = [there(np.concatenate(trees)), offsets(counts), *(there(x) for x in batch.lists)]
    options = {"kv_layout": layout, "sm_scale": 0.2, "logits_soft_cap": 30.0}
    cache = tuple(there(x) for x in batch.cache)
    out, lse = ops.tree_attention(there(q), cache, *lists, return_lse=True, **options)
    masks = [tree_mask(tree, n) for tree, n in zip(trees, lengths, strict=True)]
    expected = batch.expected(q, counts, dtype, masks=masks, sm_scale=0.2, soft_cap=30.0)
    check(out.to_numpy(), lse.to_numpy(), expected, dtype)


def test_what_is_refused():
    wrapper = ops.BlockSparseAttentionWrapper()
    indptr, indices = np.array([0, 1], np.int32), np.array([0], np.int32)
    wrapper.plan(indptr, indices, 4, 2, 4, 2, 1, 1, 16)
    q, k = np.zeros((4, 1, 16), np.float16), np.zeros((2, 1, 16), np.float16)
    on_cpu = r"expected a tensor on cuda:0, got one on cpu"
    for arguments, message in (
        ((there(q), k, there(k)), r"\] k: " + on_cpu),
        ((there(q), there(k), k), r"\] v: " + on_cpu),
        ((there(q[:3]), there(k), there(k)), r"\] q: expected shape"),
        ((there(q), there(k)[:, 0], there(k)), r"\] k: expected 3 dimensions"),
    ):
        with pytest.raises(InvalidArgumentError, match=r"^\[block_sparse_attention" + message):
            wrapper.run(*arguments)

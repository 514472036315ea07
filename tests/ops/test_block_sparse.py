"""Block-sparse attention against float64 with the blocks as a mask."""

import numpy as np
import pytest
import torch

from effinfer import InvalidArgumentError, ops
from tests.ops.batches import as_dtype, values_of
from tests.ops.reference import assert_attention, attend, seen
from tests.ops.test_block_lists import random_matrix
from tests.ops.test_decode import bf16_products


def inputs(rng, M, N, heads, kv_heads, head_dim, dtype="float32"):
    shapes = (M, heads), (N, kv_heads), (N, kv_heads)
    arrays = [
        as_dtype(rng.standard_normal((*shape, head_dim), np.float32), dtype) for shape in shapes
    ]
    return arrays, [values_of(x, dtype) for x in arrays]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("R", "C", "rows", "columns"), [(1, 1, 9, 40), (16, 16, 8, 20), (64, 64, 3, 9), (5, 33, 7, 6)]
)
@pytest.mark.parametrize("causal", [False, True])
def test_blocks(isa, dtype, R, C, rows, columns, causal):
    rng = np.random.default_rng(R)
    block_map, indptr, indices = random_matrix(rng, rows, columns)
    M, N = rows * R, columns * C
    arrays, exact = inputs(rng, M, N, 4, 2, 64, dtype)
    wrapper = ops.BlockSparseAttentionWrapper(None)
    wrapper.plan(indptr, indices, M, N, R, C, 4, 2, 64, causal=causal)
    out, lse = wrapper.run(*arrays, return_lse=True)
    mask = np.repeat(np.repeat(block_map, R, 0), C, 1) & seen(M, N, causal)
    products = bf16_products(dtype, dtype)
    expected = attend(*exact, mask)
    assert_attention(values_of(out, dtype), lse, expected, dtype=dtype, bf16_products=products)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("R", "C"), [(3, 5), (16, 8), (16, 64)])
def test_masks(isa, packed, R, C):
    rng = np.random.default_rng(C)
    _, indptr, indices = random_matrix(rng, 6, 8)
    M, N = 6 * R, 8 * C
    arrays, exact = inputs(rng, M, N, 3, 1, 64)
    blocks = rng.random((len(indices), R, C)) < 0.5
    mask = np.zeros((M, N), bool)
    for i in range(6):
        for b in range(indptr[i], indptr[i + 1]):
            j = indices[b]
            mask[i * R : (i + 1) * R, j * C : (j + 1) * C] = blocks[b]
    rows = [blocks[indptr[i] : indptr[i + 1]].swapaxes(0, 1).reshape(-1) for i in range(6)]
    bits = np.concatenate([np.packbits(row, bitorder="little") for row in rows])
    given = {"packed_mask": bits} if packed else {"mask": blocks}
    wrapper = ops.BlockSparseAttentionWrapper()
    wrapper.plan(indptr, indices, M, N, R, C, 3, 1, 64, logits_soft_cap=5.0, **given)
    out, lse = wrapper.run(*arrays, return_lse=True, lse_base="ln")
    expected = attend(*exact, mask, soft_cap=5.0)
    assert_attention(out, lse, expected, lse_base="ln")


def test_all_blocks_are_dense_attention(isa):
    rng = np.random.default_rng(1)
    (q, k, v), exact = inputs(rng, 64, 512, 4, 4, 128)
    wrapper = ops.BlockSparseAttentionWrapper()
    indptr = np.arange(0, 33, 8, dtype=np.int32)
    wrapper.plan(indptr, np.tile(np.arange(8, dtype=np.int32), 4), 64, 512, 16, 64, 4, 4, 128)
    out = wrapper.run(q, k, v)
    assert_attention(out, None, attend(*exact, seen(64, 512)))
    torch_out = wrapper.run(*(torch.from_numpy(x) for x in (q, k, v)))
    np.testing.assert_array_equal(torch_out.numpy(), out)
    target = np.empty_like(out)
    assert wrapper.run(q, k, v, out=target) is target
    np.testing.assert_array_equal(target, out)


def random_sizes(rng, heads, blocks, total):
    cuts = np.sort(rng.integers(0, total + 1, (heads, blocks - 1)))
    return np.diff(cuts, prepend=0, append=total).astype(np.int32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
def test_variable_blocks(isa, dtype, causal):
    rng = np.random.default_rng(2)
    kv_heads, group, M, N = 3, 2, 150, 400
    rows, columns = random_sizes(rng, kv_heads, 6, M), random_sizes(rng, kv_heads, 9, N)
    block_map = rng.random((kv_heads, 6, 9)) < 0.5
    arrays, exact = inputs(rng, M, N, kv_heads * group, kv_heads, 64, dtype)
    wrapper = ops.VariableBlockSparseAttentionWrapper(None)
    heads = kv_heads * group, kv_heads, 64
    wrapper.plan(block_map, rows, torch.from_numpy(columns), *heads, causal=causal)
    turned = [np.ascontiguousarray(x.swapaxes(0, 1)) for x in arrays]
    out, lse = wrapper.run(*turned, return_lse=True)
    masks = [np.repeat(np.repeat(block_map[h], columns[h], 1), rows[h], 0) for h in range(kv_heads)]
    mask = np.repeat(np.stack(masks), group, 0) & seen(M, N, causal)
    expected = attend(*exact, mask)
    products = bf16_products(dtype, dtype)
    got = values_of(np.ascontiguousarray(out.swapaxes(0, 1)), dtype)
    assert_attention(got, lse.T, expected, dtype=dtype, bf16_products=products)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, r"block_mask_map: expected shape \[3, MB, NB\]"),
        ({"block_row_sz": np.array([[2, 3], [2, 2]])}, "block_row_sz: expected the sum"),
        ({"block_col_sz": np.array([[2, -1], [0, 1]])}, "block_col_sz: expected no negative"),
        ({"block_col_sz": np.array([[2.0, 1], [0, 1]])}, "block_col_sz: expected int32 or int64"),
        ({"num_qo_heads": 3}, "num_qo_heads: expected a multiple of 2"),
    ],
)
def test_errors_of_variable_blocks(changes, message):
    plan = {
        "block_mask_map": np.ones((2, 2, 2), bool),
        "block_row_sz": np.array([[2, 3], [1, 4]]),
        "block_col_sz": np.array([[2, 3], [1, 4]]),
        "num_qo_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 64,
    }
    with pytest.raises(InvalidArgumentError, match=message):
        ops.VariableBlockSparseAttentionWrapper().plan(**(plan | changes))


def test_errors_of_runs():
    wrapper = ops.BlockSparseAttentionWrapper()
    with pytest.raises(InvalidArgumentError, match=r"expected plan\(\) before run\(\)"):
        wrapper.run(None, None, None)
    indptr, indices = np.array([0, 1], np.int32), np.array([0], np.int32)
    with pytest.raises(InvalidArgumentError, match=r"mask: expected bool \(1, 4, 2\)"):
        wrapper.plan(indptr, indices, 4, 2, 4, 2, 1, 1, 16, mask=np.ones((1, 2, 4), bool))
    wrapper.plan(indptr, indices, 4, 2, 4, 2, 1, 1, 16)
    q, k = np.zeros((4, 1, 16), np.float32), np.zeros((2, 1, 16), np.float32)
    for arguments in [(q[:3], k, k), (q, k[:1], k), (q, k, k[:1]), (q, k[0], k)]:
        with pytest.raises(InvalidArgumentError, match=r"^\[.*\] (q|k|v): expected"):
            wrapper.run(*arguments)


def test_random_lists(isa):
    """Any lists: a typed error, or the attention that they describe."""
    rng = np.random.default_rng(3)
    worked = 0
    for _ in range(60):
        R, C = (int(n) for n in rng.integers(1, 9, 2))
        rows, columns = (int(n) for n in rng.integers(1, 6, 2))
        block_map, indptr, indices = random_matrix(rng, rows, columns)
        if rng.random() < 0.3:
            indices = rng.integers(-1, columns + 1, len(indices)).astype(np.int32)
        if rng.random() < 0.2:
            indptr = rng.permutation(indptr)
        arrays, exact = inputs(rng, rows * R, columns * C, 2, 1, 16)
        wrapper = ops.BlockSparseAttentionWrapper()
        try:
            wrapper.plan(indptr, indices, rows * R, columns * C, R, C, 2, 1, 16)
            out, lse = wrapper.run(*arrays, return_lse=True)
        except InvalidArgumentError:
            continue
        worked += 1
        block_map[:] = False
        for i in range(rows):
            block_map[i, indices[indptr[i] : indptr[i + 1]]] = True
        mask = np.repeat(np.repeat(block_map, R, 0), C, 1)
        assert_attention(out, lse, attend(*exact, mask))
    assert worked > 20

"""Attention of trees of drafts against float64."""

import numpy as np
import pytest

from effinfer import InvalidArgumentError, ops
from tests.ops.batches import Paged, Shape, offsets, values_of
from tests.ops.reference import assert_attention
from tests.ops.test_decode import bf16_products

KV_LENS = [1, 5, 9, 90, 700]
ROWS = [1, 0, 9, 70, 33]


def random_parents(rng, rows):
    return np.array([int(rng.integers(-1, i)) if i else -1 for i in range(rows)], np.int32)


def tree_mask(parents, length):
    rows = len(parents)
    mask = np.zeros((rows, length), bool)
    mask[:, : length - rows] = True
    for i, parent in enumerate(parents):
        if parent >= 0:
            mask[i] |= mask[parent]
        mask[i, length - rows + i] = True
    return mask


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trees(isa, layout, dtype):
    rng = np.random.default_rng(1)
    batch = Paged(rng, KV_LENS, 16, Shape(6, 3, 64), dtype, layout)
    q = batch.queries(ROWS, dtype)
    trees = [random_parents(rng, n) for n in ROWS]
    lists = np.concatenate(trees), offsets(ROWS), *batch.lists
    options = {"kv_layout": layout, "sm_scale": 0.2, "logits_soft_cap": 30.0}
    out, lse = ops.tree_attention(q, batch.cache, *lists, return_lse=True, **options)
    masks = [tree_mask(tree, n) for tree, n in zip(trees, KV_LENS, strict=True)]
    expected = batch.expected(q, ROWS, dtype, masks=masks, sm_scale=0.2, soft_cap=30.0)
    products = bf16_products(dtype, dtype)
    assert_attention(values_of(out, dtype), lse, expected, dtype=dtype, bf16_products=products)


def test_a_chain_is_causal(isa):
    rng = np.random.default_rng(2)
    batch = Paged(rng, [40, 90], 16)
    q = batch.queries([7, 20])
    chain = np.concatenate([np.arange(n) - 1 for n in (7, 20)]).astype(np.int32)
    out = ops.tree_attention(q, batch.cache, chain, offsets([7, 20]), *batch.lists)
    assert_attention(out, None, batch.expected(q, [7, 20], causal=True))


def test_errors():
    batch = Paged(np.random.default_rng(3), [4], 4)
    q = batch.queries([2])
    for parents in ([-1, 1], [-2, 0], [-1]):
        with pytest.raises(InvalidArgumentError, match=r"^\[tree_attention\] parents"):
            lists = np.array(parents, np.int32), offsets([2]), *batch.lists
            ops.tree_attention(q, batch.cache, *lists)
    with pytest.raises(InvalidArgumentError, match=r"^\[tree_attention\] kv_len\[0\]"):
        lists = np.arange(-1, 4, dtype=np.int32), offsets([5]), *batch.lists
        ops.tree_attention(batch.queries([5]), batch.cache, *lists)
    with pytest.raises(InvalidArgumentError, match=r"^\[tree_attention\] q: expected shape"):
        lists = np.array([-1], np.int32), offsets([1]), *batch.lists
        ops.tree_attention(q, batch.cache, *lists)

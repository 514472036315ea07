"""Multi-item scoring against float64: items see one prefix and themselves."""

import numpy as np
import pytest
import torch

from effinfer import InvalidArgumentError, ops
from tests.ops.batches import Paged, Shape, offsets, values_of
from tests.ops.reference import assert_attention, attend
from tests.ops.test_decode import bf16_products


def i32(*values):
    return np.array(values, np.int32)


def scored(prefix, items, qo_len):
    """Which keys the last rows see, of a prefix and items of these lengths with a delimiter before
    each and one at the end; and the places of the tokens in their items."""
    owner, places = [-1] * prefix, []
    for item, length in enumerate(items):
        owner += [-2] + [item] * length
        places += range(length + 1)
    owner.append(-2)
    places.append(0)
    count = len(owner)
    mask = np.zeros((count, count), bool)
    for row in range(count):
        for key in range(row + 1):
            same = owner[row] >= 0 and owner[row] == owner[key]
            mask[row, key] = key < prefix or same
    return mask[count - qo_len :], places


SHAPES = [(7, [3, 1, 5], 17), (40, [2, 9], 6), (0, [4, 0, 2], 10), (33, [60, 1, 64], 129)]


def arrays(pad, prefixes, places, longest):
    table = np.zeros((len(places), pad), np.int64)
    for row, values in zip(table, places, strict=True):
        row[: len(values)] = values
    return {
        "prefix_len_ptr": torch.tensor(prefixes).to(torch.uint32),
        "token_pos_in_items_ptr": torch.from_numpy(table.reshape(-1)).to(torch.uint16),
        "token_pos_in_items_len": pad,
        "max_item_len_ptr": torch.tensor(longest).to(torch.uint16),
    }


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window_left", [-1, 20])
def test_paged(isa, layout, dtype, window_left):
    made = [scored(*shape) for shape in SHAPES]
    lengths = [mask.shape[1] for mask, _ in made]
    rows = [shape[2] for shape in SHAPES]
    batch = Paged(np.random.default_rng(1), lengths, 16, Shape(4, 2, 64), dtype, layout)
    wrapper = ops.BatchPrefillWithPagedKVCacheWrapper(None, layout)
    given = arrays(140, [s[0] for s in SHAPES], [p for _, p in made], [max(p) for _, p in made])
    lists = (offsets(rows), *batch.lists, 4, 2, 64, 16)
    wrapper.plan(*lists, causal=True, window_left=window_left, **given)
    q = batch.queries(rows, dtype)
    out, lse = wrapper.run(q, batch.cache, return_lse=True)
    seen = [mask for mask, _ in made]
    expected = batch.expected(q, rows, dtype, masks=seen, window_left=window_left)
    options = {"dtype": dtype, "bf16_products": bf16_products(dtype, dtype)}
    assert_attention(values_of(out, dtype), lse, expected, **options)


def test_ragged(isa):
    prefix, items, rows = SHAPES[0]
    mask, places = scored(prefix, items, rows)
    count = mask.shape[1]
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((n, h, 64), np.float32) for n, h in
               ((rows, 4), (count, 2), (count, 2)))  # fmt: skip
    wrapper = ops.BatchPrefillWithRaggedKVCacheWrapper()
    lists = (i32(0, rows), i32(0, count), 4, 2, 64)
    wrapper.plan(*lists, prefix_len_ptr=i32(prefix), token_pos_in_items_ptr=np.array(places))
    out, lse = wrapper.run_return_lse(q, k, v)
    assert_attention(out, lse, attend(q, k, v, mask))


def test_an_item_alone(isa):
    """An item's rows are those of the prefix followed by this item alone."""
    rng = np.random.default_rng(3)
    prefix, items = 20, [5, 9]
    mask, places = scored(prefix, items, 17)
    q = rng.standard_normal((17, 2, 64), np.float32)
    k, v = rng.standard_normal((2, mask.shape[1], 2, 64), np.float32)
    wrapper = ops.BatchPrefillWithRaggedKVCacheWrapper()
    lists = (i32(0, 17), i32(0, 37), 2, 2, 64)
    wrapper.plan(*lists, prefix_len_ptr=i32(prefix), token_pos_in_items_ptr=np.array(places))
    out = wrapper.run(q, k, v)
    start = prefix + 7
    chosen = np.r_[0:prefix, start : start + 9]
    alone = ops.single_prefill_with_kv_cache(q[7:16], k[chosen], v[chosen], causal=True)
    np.testing.assert_allclose(out[7:16], alone, atol=1e-5)


def test_errors():
    wrapper = ops.BatchPrefillWithRaggedKVCacheWrapper()
    lists = (i32(0, 3), i32(0, 5), 2, 2, 64)
    good = {
        "prefix_len_ptr": i32(2),
        "token_pos_in_items_ptr": i32(0, 1, 0),
        "token_pos_in_items_len": 3,
        "max_item_len_ptr": i32(1),
    }
    wrapper.plan(*lists, **good)
    for changes, message in (
        ({"prefix_len_ptr": None}, "token_pos_in_items_ptr: expected None without prefix_len_ptr"),
        ({"prefix_len_ptr": i32(2, 2)}, "prefix_len_ptr: expected 1 values, got 2"),
        ({"prefix_len_ptr": i32(-1)}, "prefix_len_ptr: expected no negative length"),
        ({"prefix_len_ptr": np.ones(1)}, "prefix_len_ptr: expected integers, got float64"),
        (
            {"prefix_len_ptr": i32(1), "token_pos_in_items_len": 4},
            "token_pos_in_items_ptr: expected 4 values or more",
        ),
        ({"token_pos_in_items_ptr": None}, "token_pos_in_items_ptr: expected an array"),
        ({"token_pos_in_items_ptr": i32(0, -1, 0)}, "token_pos_in_items_ptr: expected no negative"),
        ({"token_pos_in_items_len": -1}, "token_pos_in_items_len: expected 0 or the tokens"),
        ({"token_pos_in_items_len": 2}, "token_pos_in_items_len: expected 0 or the tokens"),
        ({"max_item_len_ptr": i32(0)}, r"max_item_len_ptr\[0\]: expected 1 or more, got 0"),
        ({"max_item_len_ptr": i32(1, 1)}, "max_item_len_ptr: expected 1 values"),
        ({"custom_mask": np.ones((3, 5), bool)}, "custom_mask: expected None with prefix_len_ptr"),
        ({"packed_custom_mask": np.ones(2, np.uint8)}, "packed_custom_mask: expected None with"),
    ):
        with pytest.raises(InvalidArgumentError, match=rf"^\[.*\] {message}"):
            wrapper.plan(*lists, **(good | changes))


@pytest.mark.parametrize("seed", range(4))
def test_any_places(isa, seed):
    """Any numbers for places, prefixes beyond the keys, more rows than keys: by the definition."""
    rng = np.random.default_rng(seed)
    lengths, rows, prefixes, places, seen = [], [], [], [], []
    for _ in range(5):
        tokens = int(rng.integers(0, 200))
        prefix = int(rng.integers(0, tokens + 20))
        count = int(rng.integers(0, tokens + 10))
        own = rng.integers(0, rng.integers(2, 300), max(tokens - prefix, 0))
        if rng.random() < 0.5:
            own = np.repeat(own[::7], 7)[: own.size] + np.arange(own.size) % 7
        row, key = np.arange(tokens - count, tokens)[:, None], np.arange(tokens)[None]
        t = np.zeros(count, int)
        t[row[:, 0] >= prefix] = own[row[row >= prefix] - prefix]
        mask = (key <= row) & ((row < prefix) | (key < prefix) | (row < key + t[:, None]))
        lengths.append(tokens)
        rows.append(count)
        prefixes.append(prefix)
        places.append(own)
        seen.append(mask)
    batch = Paged(rng, lengths, 16, Shape(4, 2, 64))
    longest = [int(p.max(initial=0)) for p in places]
    wrapper = ops.BatchPrefillWithPagedKVCacheWrapper()
    given = arrays(220, prefixes, places, longest)
    wrapper.plan(offsets(rows), *batch.lists, 4, 2, 64, 16, **given)
    q = batch.queries(rows)
    out, lse = wrapper.run_return_lse(q, batch.cache)
    assert_attention(out, lse, batch.expected(q, rows, masks=seen))


def test_cost_is_that_of_what_is_seen():
    """Items do not visit each other."""
    rows, item = 64 * 65, 64
    places = np.tile(np.arange(item), 64)
    lists = (i32(0, rows), i32(0, rows), 2, 1, 64)
    wrapper = ops.BatchPrefillWithRaggedKVCacheWrapper()
    wrapper.plan(*lists, causal=True)
    dense = wrapper._planned._plan.num_products
    wrapper.plan(*lists, prefix_len_ptr=i32(64), token_pos_in_items_ptr=places)
    assert wrapper._planned._plan.num_products < dense / 10

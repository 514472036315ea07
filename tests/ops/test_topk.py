"""The highest of rows, with ties and windows, against sorting."""

import numpy as np
import pytest
import torch

from effinfer import InvalidArgumentError, ops
from tests.ops.rows import DTYPES

NONE, SMALL, LARGE = ops.TopKTieBreak
every_tie = pytest.mark.parametrize("tie", [NONE, SMALL, LARGE])
every_dtype = pytest.mark.parametrize("dtype", list(DTYPES))


def highest(row, k, tie, ordered=False):
    """Ids of the k highest, in the order of ids or highest first."""
    ids = np.arange(len(row))
    best = np.lexsort((-ids if tie == LARGE else ids, -row.astype(np.float64)))[:k]
    return best if ordered else np.sort(best)


def scores(rng, *shape, dtype="float32"):
    """Few different values: most boundaries cut through equals. Some are infinite."""
    x = rng.integers(-4, 5, shape).astype(np.float32) / 4
    x[rng.random(shape) < 0.05] = -np.inf
    return x.astype(DTYPES[dtype][0])


@every_tie
@every_dtype
@pytest.mark.parametrize("ordered", [False, True])
def test_ties(isa, tie, dtype, ordered):
    rng = np.random.default_rng(0)
    for rows, n, k in ((1, 1, 1), (5, 40, 7), (3, 1000, 300), (2, 64, 64)):
        x = scores(rng, rows, n, dtype=dtype)
        values, ids = ops.top_k(x, k, ordered, True, tie, True)
        expected = np.stack([highest(row, k, tie, ordered) for row in x])
        np.testing.assert_array_equal(ids, expected)
        np.testing.assert_array_equal(values, np.take_along_axis(x, expected, axis=1))


def windows(rng, rows, n):
    """Windows of all sizes, empty and whole ones too."""
    lengths = rng.integers(0, n + 1, rows).astype(np.int32)
    lengths[:2] = 0, n
    starts = rng.integers(0, n - lengths + 1).astype(np.int32)
    return starts, lengths


def expected_ids(x, starts, lengths, k, tie):
    ids = np.full((len(x), k), -1)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        best = highest(x[row, start : start + length], k, tie)
        ids[row, : best.size] = best
    return ids


@every_tie
@every_dtype
@pytest.mark.parametrize("k", [1, 9, 100, 500])
def test_ragged_transform(isa, tie, dtype, k):
    rng = np.random.default_rng(k)
    x = scores(rng, 12, 200, dtype=dtype)
    starts, lengths = windows(rng, 12, 200)
    offsets = rng.integers(0, 10000, 12).astype(np.int32)
    for given in (starts, None):
        begins = np.zeros_like(starts) if given is None else starts
        expected = expected_ids(x, begins, lengths, k, tie)
        expected = np.where(expected >= 0, expected + offsets[:, None], -1)
        # What lies outside of the windows must not matter.
        stale = x.copy()
        for row in range(12):
            stale[row, begins[row] + lengths[row] :] = np.nan
            stale[row, : begins[row]] = np.nan
        got = ops.top_k_ragged_transform(stale, offsets, lengths, k, True, tie, True, given)
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, expected)


@every_tie
@pytest.mark.parametrize("page_size", [1, 16])
def test_page_table_transform(isa, tie, page_size):
    rng = np.random.default_rng(page_size)
    rows, n, k = 9, 160, 33
    x = scores(rng, rows, n)
    starts, lengths = windows(rng, rows, n)
    table = rng.permutation(4 * 400).reshape(4, 400).astype(np.int32)
    batches = rng.integers(0, 4, rows).astype(np.int32)
    first = rng.integers(0, 400 - n // page_size, rows).astype(np.int32)
    out, raw = np.empty((rows, k), np.int32), np.empty((rows, k), np.int32)
    got = ops.top_k_page_table_transform(
        x, table, lengths, k, batches, True, tie, False, starts, first,
        page_size=page_size, out=out, out_raw_indices=raw,
    )  # fmt: skip
    assert got is out
    ids = expected_ids(x, starts, lengths, k, tie)
    np.testing.assert_array_equal(raw, ids)
    pages = table[batches[:, None], np.where(ids >= 0, first[:, None] + ids // page_size, 0)]
    expected = np.where(ids >= 0, pages * page_size + ids % page_size, -1)
    np.testing.assert_array_equal(got, expected)


def test_defaults_of_page_tables():
    """A row is its own sequence, and the window of its pages begins where that of its scores does;
    results are of the kind of the scores, which may have strides."""
    rng = np.random.default_rng(3)
    whole = torch.from_numpy(scores(rng, 4, 60))
    x, table = whole[:, :50], torch.randperm(200).reshape(4, 50).int()
    starts, lengths = torch.tensor([0, 5, 9, 49]).int(), torch.tensor([50, 20, 3, 1]).int()
    got = ops.top_k_page_table_transform(x, table, lengths, 8, row_starts=starts)
    assert isinstance(got, torch.Tensor) and got.dtype == torch.int32
    ids = expected_ids(x.numpy(), starts.numpy(), lengths.numpy(), 8, SMALL)
    entries = np.where(ids >= 0, ids + starts.numpy()[:, None], 0)
    expected = np.where(ids >= 0, np.take_along_axis(table.numpy(), entries, axis=1), -1)
    np.testing.assert_array_equal(got.numpy(), expected)
    nothing = ops.top_k_ragged_transform(x[:0], starts[:0], lengths[:0], 3)
    assert nothing.shape == (0, 3)


def test_errors():
    x, table = np.zeros((2, 8), np.float32), np.zeros((2, 8), np.int32)
    lengths = np.array([8, 3], np.int32)
    good = {"input": x, "src_page_table": table, "lengths": lengths, "k": 3}
    two = lengths * 0
    for changes, message in (
        ({"input": x[0]}, "input: expected 2 dimensions"),
        ({"k": 0}, "k: expected a positive number"),
        ({"lengths": np.array([9, 3], np.int32)}, "lengths: expected windows within the 8 scores"),
        ({"lengths": np.array([-1, 3], np.int32)}, "lengths: expected windows"),
        ({"lengths": lengths[:1]}, "lengths: expected 2 values, got 1"),
        ({"row_starts": np.array([1, 0], np.int32)}, "lengths: expected windows"),
        ({"tie_break": 3}, "tie_break: expected a TopKTieBreak, 0 to 2, got 3"),
        ({"src_page_table": table.astype(np.int64)}, "src_page_table: expected int32"),
        ({"src_page_table": table - 1}, "src_page_table: expected pages whose slots fit int32"),
        ({"src_page_table": table[:1]}, "row_to_batch: expected numbers below 1"),
        ({"row_to_batch": np.array([0, 2], np.int32)}, "row_to_batch: expected numbers below 2"),
        ({"row_to_batch": two[:1]}, "row_to_batch: expected 2 values"),
        ({"page_size": 3}, "page_size: expected a power of two"),
        ({"page_size": 2, "row_starts": two}, "page_table_row_starts: expected an array"),
        ({"page_table_row_starts": two - 1}, "src_page_table: expected"),
        ({"page_table_row_starts": two + 6}, "src_page_table: expected 9 pages"),
        ({"out": np.zeros((2, 2), np.int32)}, r"out: expected int32 \(2, 3\)"),
        ({"out_raw_indices": np.zeros((2, 3))}, r"out_raw_indices: expected int32 \(2, 3\)"),
        ({"input": x.astype(np.int32)}, "input: expected float32 or float16"),
    ):
        with pytest.raises(InvalidArgumentError, match=r"^\[top_k.*\] " + message):
            ops.top_k_page_table_transform(**(good | changes))
    with pytest.raises(InvalidArgumentError, match="offsets: expected 2 values"):
        ops.top_k_ragged_transform(x, two[:1], lengths, 3)
    with pytest.raises(InvalidArgumentError, match="offsets: expected ids that fit int32"):
        ops.top_k_ragged_transform(x, two + np.int32(2**31 - 1), lengths, 3)
    with pytest.raises(InvalidArgumentError, match=r"^\[top_k\] tie_break"):
        ops.top_k(x, 3, tie_break=-1)

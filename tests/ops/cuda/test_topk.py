"""The highest of rows with ties and windows, and booleans as bits, on a GPU."""

import ml_dtypes
import numpy as np
import pytest

from effinfer import InvalidArgumentError, UnsupportedError, ops
from tests.ops.cuda.gpu_arrays import here, there
from tests.ops.test_topk import (
    LARGE,
    SMALL,
    every_dtype,
    every_tie,
    expected_ids,
    highest,
    scores,
    windows,
)


@every_dtype
@pytest.mark.parametrize("ordered", [False, True])
def test_the_higher_of_equal_ids(dtype, ordered):
    rng = np.random.default_rng(0)
    for rows, n, k in ((1, 1, 1), (3, 40, 7), (2, 64, 64)):
        x = scores(rng, rows, n, dtype=dtype)
        values, ids = ops.top_k(there(x), k, ordered, True, LARGE)
        expected = np.stack([highest(row, k, LARGE, ordered) for row in x])
        np.testing.assert_array_equal(here(ids), expected)
        chosen = np.take_along_axis(x, expected, axis=1)
        np.testing.assert_array_equal(here(values).astype("f4"), chosen.astype("f4"))


@every_tie
@every_dtype
@pytest.mark.parametrize("k", [1, 9, 90])
def test_ragged_transform(tie, dtype, k):
    rng = np.random.default_rng(k)
    x = scores(rng, 6, 80, dtype=dtype)
    starts, lengths = windows(rng, 6, 80)
    offsets = rng.integers(0, 10000, 6).astype(np.int32)
    for given in (starts, None):
        begins = np.zeros_like(starts) if given is None else starts
        expected = expected_ids(x, begins, lengths, k, tie)
        expected = np.where(expected >= 0, expected + offsets[:, None], -1)
        # What lies outside of the windows must not matter.
        stale = x.copy()
        for row in range(6):
            stale[row, begins[row] + lengths[row] :] = np.nan
            stale[row, : begins[row]] = np.nan
        placed = None if given is None else there(given)
        got = ops.top_k_ragged_transform(
            there(stale), there(offsets), there(lengths), k, True, tie, True, placed
        )
        assert here(got).dtype == np.int32
        np.testing.assert_array_equal(here(got), expected)


@every_tie
@pytest.mark.parametrize("page_size", [1, 16])
def test_page_table_transform(tie, page_size):
    rng = np.random.default_rng(page_size)
    rows, n, k = 5, 96, 33
    x = scores(rng, rows, n)
    starts, lengths = windows(rng, rows, n)
    table = rng.permutation(4 * 400).reshape(4, 400).astype(np.int32)
    batches = rng.integers(0, 4, rows).astype(np.int32)
    first = rng.integers(0, 400 - n // page_size, rows).astype(np.int32)
    out, raw = (there(np.empty((rows, k), np.int32)) for _ in range(2))
    given = [there(a) for a in (x, table, lengths)]
    got = ops.top_k_page_table_transform(
        *given, k, there(batches), True, tie, False, there(starts), there(first),
        page_size=page_size, out=out, out_raw_indices=raw,
    )  # fmt: skip
    assert got is out
    ids = expected_ids(x, starts, lengths, k, tie)
    np.testing.assert_array_equal(here(raw), ids)
    pages = table[batches[:, None], np.where(ids >= 0, first[:, None] + ids // page_size, 0)]
    np.testing.assert_array_equal(
        here(got), np.where(ids >= 0, pages * page_size + ids % page_size, -1)
    )


def test_defaults_and_wild_windows():
    """Rows may have strides; windows that leave their rows are cut."""
    rng = np.random.default_rng(3)
    whole = scores(rng, 3, 60, dtype="bfloat16")
    table = np.arange(150, dtype=np.int32).reshape(3, 50)
    starts, lengths = np.array([0, -5, 40], np.int32), np.array([99, 20, 20], np.int32)
    got = ops.top_k_page_table_transform(
        there(whole)[:, :50], there(table), there(lengths), 8, row_starts=there(starts * 0)
    )
    x = whole[:, :50].astype(np.float32)
    ids = expected_ids(x, starts * 0, np.minimum(lengths, 50), 8, SMALL)
    np.testing.assert_array_equal(here(got), np.take_along_axis(table, ids, axis=1))
    wild = ops.top_k_ragged_transform(there(x), None, there(lengths), 8, row_starts=there(starts))
    cut = np.maximum(starts, 0), np.array([50, 20, 10])
    np.testing.assert_array_equal(here(wild), expected_ids(x, *cut, 8, SMALL))
    assert here(ops.top_k_ragged_transform(there(x[:0]), None, None, 3)).shape == (0, 3)


def test_errors_of_transforms():
    x, lengths = there(np.zeros((2, 8), np.float32)), there(np.array([8, 3], np.int32))
    table = there(np.zeros((2, 8), np.int32))
    good = {"input": x, "src_page_table": table, "lengths": lengths, "k": 3}
    for changes, message in (
        ({"input": x[0]}, "input: expected 2 dimensions"),
        ({"k": 0}, "k: expected a positive number"),
        ({"lengths": lengths[:1]}, r"lengths: expected shape \[2\]"),
        ({"lengths": np.zeros(2, np.int32)}, "lengths: expected a tensor on cuda:0"),
        ({"src_page_table": there(np.zeros((2, 8)).astype(np.int64))}, "src_page_table: expected"),
        ({"tie_break": 3}, "tie_break: expected a TopKTieBreak"),
        ({"page_size": 3}, "page_size: expected a power of two"),
        ({"out": there(np.zeros((2, 2), np.int32))}, r"out: expected int32 \(2, 3\)"),
        ({"input": there(np.zeros((2, 8), np.int32))}, "input: expected dtype f32, f16 or bf16"),
    ):
        error = (InvalidArgumentError, UnsupportedError)
        with pytest.raises(error, match=r"^\[top_k_page_table_transform\] " + message):
            ops.top_k_page_table_transform(**(good | changes))


@pytest.mark.parametrize("bitorder", ["big", "little"])
def test_packbits(bitorder):
    rng = np.random.default_rng(4)
    for size in (0, 1, 7, 8, 65, 1000):
        x = rng.integers(0, 2, size).astype(bool)
        packed = ops.packbits(there(x), bitorder)
        np.testing.assert_array_equal(here(packed), np.packbits(x, bitorder=bitorder))
        values = x * rng.integers(1, 256, size).astype(np.uint8)
        np.testing.assert_array_equal(here(ops.packbits(there(values), bitorder)), here(packed))


@pytest.mark.parametrize("bitorder", ["big", "little"])
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_segments(bitorder, index):
    lengths = np.array([0, 4, 3, 0, 0, 4, 900, 1, 8, 0, 64, 5, 0])
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(index)
    x = np.random.default_rng(5).integers(0, 2, indptr[-1]).astype(bool)
    expected, starts = ops.segment_packbits(x, indptr, bitorder)
    for given in (indptr, there(indptr)):
        packed, made = ops.segment_packbits(there(x), given, bitorder)
        np.testing.assert_array_equal(here(packed), expected)
        assert here(made).dtype == index
        np.testing.assert_array_equal(here(made), starts)


def test_errors_of_bits():
    x = there(np.zeros(8, bool))
    for call, message in (
        (lambda: ops.packbits(x, "middle"), r"\[packbits\] bitorder: expected big or little"),
        (lambda: ops.packbits(there(np.zeros(8, ml_dtypes.bfloat16))), r"\[packbits\] x: expected"),
        (lambda: ops.segment_packbits(x, np.array([0, 9])), r"\[segment_packbits\] indptr"),
    ):
        with pytest.raises(InvalidArgumentError, match="^" + message):
            call()

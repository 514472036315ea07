"""Booleans as bits."""

import numpy as np
import pytest
import torch

from effinfer import InvalidArgumentError, _core, ops

SIZES = [0, 1, 7, 8, 9, 63, 64, 65, 1000, 16384, 16391, 50001]
orders = pytest.mark.parametrize("bitorder", ["big", "little"])


def booleans(seed, size):
    return np.random.default_rng(seed).integers(0, 2, size).astype(bool)


@orders
@pytest.mark.parametrize("size", SIZES)
def test_packbits_is_numpys(bitorder, size):
    x = booleans(size, size)
    np.testing.assert_array_equal(ops.packbits(x, bitorder), np.packbits(x, bitorder=bitorder))
    values = x * np.random.default_rng(1).integers(1, 256, size).astype(np.uint8)
    packed = ops.packbits(values, bitorder, pool=_core.ThreadPool(3, oversubscribe=True))
    np.testing.assert_array_equal(packed, np.packbits(x, bitorder=bitorder))


def test_every_byte():
    elements = np.unpackbits(np.arange(256, dtype=np.uint8))
    np.testing.assert_array_equal(ops.packbits(elements), np.arange(256))
    np.testing.assert_array_equal(ops.packbits(elements * np.uint8(128)), np.arange(256))


@orders
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_segments(bitorder, index):
    lengths = np.array([0, 4, 3, 0, 0, 4, 20000, 1, 8, 0, 16384, 5, 0])
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(index)
    x = booleans(2, indptr[-1])
    packed, starts = ops.segment_packbits(x, indptr, bitorder)
    assert starts.dtype == index
    np.testing.assert_array_equal(np.diff(starts), (lengths + 7) // 8)
    for i in range(len(lengths)):
        segment = np.packbits(x[indptr[i] : indptr[i + 1]], bitorder=bitorder)
        np.testing.assert_array_equal(packed[starts[i] : starts[i + 1]], segment)


def test_torch_in_torch_out():
    x = torch.tensor([1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1], dtype=torch.bool)
    packed, starts = ops.segment_packbits(x, torch.tensor([0, 4, 7, 11]))
    assert packed.tolist() == [0b10110000, 0b00100000, 0b11010000]
    assert torch.equal(starts, torch.tensor([0, 1, 2, 3]))
    assert torch.equal(ops.packbits(x), torch.tensor([0b10110011, 0b10100000]))
    empty, starts = ops.segment_packbits(x[:0], torch.tensor([0]))
    assert empty.shape == (0,)
    assert starts.tolist() == [0]


@pytest.mark.parametrize(
    ("x", "indptr", "bitorder", "message"),
    [
        (np.zeros(4, bool), [0, 4], "middle", r"bitorder: expected big or little, got .middle"),
        (np.zeros(4, np.float32), [0, 4], "big", r"x: expected dtype u8, got f32"),
        (np.zeros((2, 2), bool), [0, 4], "big", r"x: expected 1 dimensions, got shape \[2, 2\]"),
        (np.zeros(4, bool), [0, 3], "big", r"indptr: expected 4 last, got 3"),
        (np.zeros(4, bool), [1, 4], "big", r"indptr: expected 0 first, got 1"),
        (np.zeros(4, bool), [0, 5, 4], "big", r"indptr: expected values that never.* 5 before 4"),
        (np.zeros(4, bool), [[0, 4]], "big", r"indptr: expected 1 dimensions"),
        (np.zeros(4, bool), [], "big", r"indptr: expected .*"),
        (np.zeros(4, bool), [0.0, 4.0], "big", r"indptr: expected .*"),
    ],
)
def test_errors(x, indptr, bitorder, message):
    with pytest.raises(InvalidArgumentError, match=message):
        ops.segment_packbits(x, np.array(indptr), bitorder)

"""Embedding rows of every weight type."""

import gguf
import numpy as np
import pytest

from effinfer import _core, ops

# Types that the gguf package encodes, and those that it only decodes.
ENCODABLE = ["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "tq1_0", "tq2_0"]
DECODABLE = ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"]


def make_table(dtype, rows, cols):
    """A random table: its bytes, and its values by the gguf package."""
    rng = np.random.default_rng(rows * cols)
    kind = gguf.GGMLQuantizationType[dtype.upper()]
    if dtype in ENCODABLE:
        table = gguf.quants.quantize(rng.standard_normal((rows, cols), np.float32), kind)
    else:
        block, size = gguf.GGML_QUANT_SIZES[kind]
        # Bytes up to 0x7b: neither a float16 infinity nor a NaN, wherever the scales lie.
        table = rng.integers(0, 0x7C, (rows, cols // block * size), np.uint8)
    return np.ascontiguousarray(table), gguf.quants.dequantize(table, kind).astype(np.float32)


@pytest.mark.parametrize("dtype", ENCODABLE + DECODABLE)
def test_rows_are_those_of_the_table(isa, dtype):
    table, values = make_table(dtype, 11, 512)
    ids = np.array([3, 0, 10, 3, 7], np.int32)
    out = ops.embedding(ids, table.view(np.uint8), dtype, (11, 512))
    np.testing.assert_array_equal(out, values[ids])
    scaled = ops.embedding(ids, table.view(np.uint8), dtype, (11, 512), scale=22.5)
    np.testing.assert_array_equal(scaled, values[ids] * np.float32(22.5))


def test_rows_of_i2_s(isa):
    """Each row's scale lies behind the whole table."""
    rng = np.random.default_rng(3)
    table = np.concatenate([rng.integers(0, 256, 11 * 64, np.uint8), np.zeros(32, np.uint8)])
    table[-32:-28].view(np.float32)[:] = 0.3
    ids = np.array([3, 0, 10], np.int32)
    values = _core.dequantize("i2_s", table, (11, 256))
    np.testing.assert_array_equal(ops.embedding(ids, table, "i2_s", (11, 256)), values[ids])


@pytest.mark.parametrize("count", [0, 1, 33])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_any_number_of_ids_and_threads(count, threads):
    table = np.random.default_rng(0).standard_normal((5, 37), np.float32)
    ids = np.random.default_rng(1).integers(0, 5, count, np.int32)
    out = ops.embedding(ids, table, pool=_core.ThreadPool(threads, oversubscribe=True))
    np.testing.assert_array_equal(out, table[ids])
    half = table.astype(np.float16)
    np.testing.assert_array_equal(ops.embedding(ids, half), half[ids].astype(np.float32))


@pytest.mark.parametrize(
    ("ids", "table", "arguments", "message"),
    [
        ([0, 4], (4, 8), {}, r"\[embedding\] ids\[1\]: expected a value in \[0, 4\), got 4"),
        ([-1], (4, 8), {}, r"\[embedding\] ids\[0\]: expected a value in \[0, 4\), got -1"),
        ([[0]], (4, 8), {}, r"\[embedding\] ids: expected 1 dimensions, got shape \[1, 1\]"),
        ([0], (4, 8), {"shape": (5, 8)}, r"\[embedding\] table.*expected 160 bytes"),
        ([0], (32,), {}, r"\[embedding\] table: expected 2 dimensions or shape"),
        ([0], (4, 8), {"dtype": "q9_9"}, r"q9_9"),
        ([0], (4, 8), {"dtype": "i32"}, r"table: expected dtype f32, f16, bf16 or a quantised"),
        ([0], (4, 8), {"dtype": "q8_0"}, r"multiple of 32"),
        ([0], (4, 8), {"shape": (-4, -8)}, r"shape \[-4, -8\]"),
    ],
)
def test_errors(ids, table, arguments, message):
    with pytest.raises(_core.InvalidArgumentError, match=message):
        ops.embedding(np.array(ids, np.int32), np.zeros(table, np.float32), **arguments)


def test_ids_must_be_int32():
    with pytest.raises(_core.InvalidArgumentError, match=r"ids: expected dtype i32, got i64"):
        ops.embedding(np.array([0]), np.zeros((2, 2), np.float32))

"""Packed weights and matrix products, against the gguf package's values and float64 products."""

import numpy as np
import pytest

from effinfer import _core, ops
from effinfer.testing import available_isas
from effinfer.testing import isa as isa_level
from tests.tolerance import BF16_EPS, assert_close, dot_magnitude

DENSE = ["f32", "f16", "bf16"]
BLOCK32 = {"q8_0": 34, "q4_0": 18, "q4_1": 20, "q5_0": 22, "q5_1": 24, "iq4_nl": 18}
BLOCK256 = {
    "q2_k": 84,
    "q3_k": 110,
    "q4_k": 144,
    "q5_k": 176,
    "q6_k": 210,
    "iq4_xs": 136,
    "tq1_0": 54,
    "tq2_0": 66,
}
QUANTISED = [*BLOCK32, *BLOCK256]
# Where the float16 scale and minimum lie in a block.
HALVES = {
    "q8_0": [0],
    "q4_0": [0],
    "q4_1": [0, 2],
    "q5_0": [0],
    "q5_1": [0, 2],
    "iq4_nl": [0],
    "q2_k": [80, 82],
    "q3_k": [108],
    "q4_k": [0, 2],
    "q5_k": [0, 2],
    "q6_k": [208],
    "iq4_xs": [0],
    "tq1_0": [52],
    "tq2_0": [64],
}


def random_weight(dtype: str, rows: int, cols: int, seed: int = 0) -> np.ndarray:
    """Bytes of a [rows, cols] tensor: random quants under scales of ordinary size."""
    rng = np.random.default_rng(seed)
    if dtype in DENSE:
        values = (rng.standard_normal((rows, cols)) * 0.05).astype(np.float32)
        if dtype == "f32":
            return values.view(np.uint8)
        if dtype == "f16":
            return values.astype(np.float16).view(np.uint8)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    size, block = (32, BLOCK32[dtype]) if dtype in BLOCK32 else (256, BLOCK256[dtype])
    data = rng.integers(0, 256, (rows, cols // size, block), dtype=np.uint8)
    for place in HALVES[dtype]:
        scale = (rng.standard_normal((rows, cols // size)) * 0.01).astype(np.float16)
        data[:, :, place : place + 2] = scale[..., None].view(np.uint8)
    return data.reshape(rows, -1)


def pack(dtype: str, rows: int, cols: int, seed: int = 0, threads: int = 1) -> tuple:
    data = random_weight(dtype, rows, cols, seed)
    matrix = _core.PackedMatrix(
        data, dtype, (rows, cols), _core.ThreadPool(threads, oversubscribe=True)
    )
    return matrix, _core.dequantize(dtype, data, (rows, cols))


def shapes(dtype: str) -> list[tuple[int, int]]:
    if dtype in DENSE:
        return [(1, 1), (5, 7), (16, 64), (33, 100), (48, 130)]
    if dtype in BLOCK32:
        return [(1, 32), (16, 64), (33, 96), (50, 352), (64, 576)]
    return [(1, 256), (16, 256), (33, 512), (50, 768)]


def activations(n: int, cols: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, cols)).astype(np.float32)


@pytest.mark.parametrize("dtype", DENSE + QUANTISED)
def test_packing_is_exact(dtype):
    for seed, (rows, cols) in enumerate(shapes(dtype)):
        matrix, values = pack(dtype, rows, cols, seed, threads=1 + seed % 3)
        assert matrix.shape == (rows, cols) and matrix.dtype == dtype
        np.testing.assert_array_equal(matrix.unpack().view(np.uint32), values.view(np.uint32))


def int8_reference(x: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The product with the operand as the kernels round it, and its magnitude."""
    q, scales = _core.quantize_activation(x)
    cols = x.shape[1]
    rounded = q.astype(np.float64) * np.repeat(scales, 16, axis=1)[:, :cols]
    return rounded @ values.astype(np.float64).T, dot_magnitude(rounded, values)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_int8(dtype, isa):
    for seed, (rows, cols) in enumerate(shapes(dtype)):
        matrix, values = pack(dtype, rows, cols, seed)
        for n in (1, 2, 3, 5, 8, 17):
            x = activations(n, cols, seed)
            expected, magnitude = int8_reference(x, values)
            got = _core.matmul(x, matrix, "int8")
            # Minima and biased quants: the two terms cancel, the errors are relative to each.
            spread = np.abs(values).max() * np.abs(x).sum(axis=1, keepdims=True)
            assert_close(got, expected, terms=cols // 16, magnitude=magnitude + spread)


@pytest.mark.parametrize("dtype", DENSE + QUANTISED)
def test_f32(dtype, isa):
    for seed, (rows, cols) in enumerate(shapes(dtype)):
        matrix, values = pack(dtype, rows, cols, seed)
        for n in (1, 2, 5, 13, 40):
            x = activations(n, cols, seed)
            got = _core.matmul(x, matrix, "f32")
            assert_close(
                got,
                x.astype(np.float64) @ values.astype(np.float64).T,
                terms=cols,
                magnitude=dot_magnitude(x, values),
            )


@pytest.mark.skipif(not _core.has_avx512_bf16(), reason="the CPU has no AVX512-BF16")
@pytest.mark.parametrize("dtype", DENSE + QUANTISED)
def test_bf16(dtype):
    for seed, (rows, cols) in enumerate(shapes(dtype)):
        matrix, values = pack(dtype, rows, cols, seed)
        for n in (1, 5, 13, 40):
            x = activations(n, cols, seed)
            got = _core.matmul(x, matrix, "bf16")
            # Rounding errors of the operands add up like the terms of a sum.
            squares = np.sqrt((x.astype(np.float64) ** 2) @ (values.astype(np.float64) ** 2).T)
            error = np.abs(got - x.astype(np.float64) @ values.astype(np.float64).T)
            assert (error <= 4 * BF16_EPS * squares + 1e-6).all()


def all_isas_equal(call) -> np.ndarray:
    results = []
    for level in available_isas():
        with isa_level(level):
            results.append(call())
    for result in results[1:]:
        np.testing.assert_array_equal(results[0].view(np.uint32), result.view(np.uint32))
    return results[0]


@pytest.mark.parametrize("dtype", QUANTISED)
def test_int8_bits_do_not_depend_on_rows_team_or_isa(dtype):
    rows, cols = 296, 800 if dtype in BLOCK32 else 768
    matrix, _ = pack(dtype, rows, cols)
    x = activations(259, cols)
    whole = all_isas_equal(lambda: _core.matmul(x, matrix, "int8"))
    counts = [(1, 1), (1, 3), (2, 2), (3, 1), (4, 1), (5, 2), (6, 1), (7, 2), (8, 1), (16, 3)]
    for n, threads in [*counts, (17, 2), (64, 1), (67, 3), (242, 2)]:
        pool = _core.ThreadPool(threads, oversubscribe=True)
        for level in available_isas():
            with isa_level(level):
                got = _core.matmul(x[:n], matrix, "int8", pool)
            np.testing.assert_array_equal(got, whole[:n])


@pytest.mark.parametrize("dtype", ["f16", "q4_1", "q6_k"])
def test_f32_bits_do_not_depend_on_rows_or_team(dtype, isa):
    rows, cols = 72, 768
    matrix, _ = pack(dtype, rows, cols)
    x = activations(260, cols)
    whole = _core.matmul(x, matrix, "f32", _core.ThreadPool(3, oversubscribe=True))
    for n in (1, 2, 12, 13, 33, 100):
        np.testing.assert_array_equal(_core.matmul(x[:n], matrix, "f32"), whole[:n])
    if isa in ("avx512", "amx") and _core.has_avx512_bf16():
        whole = _core.matmul(x, matrix, "bf16", _core.ThreadPool(3, oversubscribe=True))
        for n in (1, 2, 12, 13, 33, 100):
            np.testing.assert_array_equal(_core.matmul(x[:n], matrix, "bf16"), whole[:n])


@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("byte", [0x00, 0x0F, 0x7F, 0x80, 0xFF])
def test_extreme_quants_do_not_overflow(dtype, byte):
    """All quants at one value times activations of +-127: the largest integer sums there are."""
    rows, cols = 16, 6912
    data = random_weight(dtype, rows, cols)
    size = 32 if dtype in BLOCK32 else 256
    blocks = data.reshape(rows, cols // size, -1)
    keep = blocks.copy()
    blocks[:] = byte
    for place in HALVES[dtype]:
        blocks[:, :, place : place + 2] = keep[:, :, place : place + 2]
    matrix = _core.PackedMatrix(data, dtype, (rows, cols))
    values = _core.dequantize(dtype, data, (rows, cols))
    x = np.ones((4, cols), np.float32)
    x[1] = -1
    x[2, ::2] = -1
    x[3] = np.sign(values[0]) + (values[0] == 0)
    expected, magnitude = int8_reference(x, values)
    got = all_isas_equal(lambda: _core.matmul(x, matrix, "int8"))
    spread = np.abs(values).max() * cols
    assert_close(got, expected, terms=cols // 16, magnitude=magnitude + spread)


def test_bias_and_residual(isa):
    for dtype, arithmetic in [("q4_0", "int8"), ("q6_k", "f32"), ("f16", "f32")]:
        matrix, values = pack(dtype, 50, 256)
        x = activations(5, 256)
        bias = activations(1, 50, 7)[0]
        residual = activations(5, 50, 8)
        plain = _core.matmul(x, matrix, arithmetic)
        got = _core.matmul(x, matrix, arithmetic, bias=bias, residual=residual)
        np.testing.assert_array_equal(got, (plain + bias) + residual)


def test_quantised_activations(isa):
    x = activations(3, 100)
    x[1, 32:64] = 0
    x[2, 5] = 1e30
    q, scales = _core.quantize_activation(x)
    blocks = np.zeros((3, 7 * 16), np.float32)
    blocks[:, :100] = x
    blocks = blocks.reshape(3, 7, 16)
    peak = np.abs(blocks).max(axis=2)
    np.testing.assert_array_equal(scales, peak / np.float32(127))
    inverse = np.float32(127) / np.where(peak > 0, peak, 1)
    expected = np.rint(blocks * inverse[..., None]).astype(np.int8).reshape(3, -1)[:, :100]
    np.testing.assert_array_equal(q, expected)


def test_non_finite_activations_stay_in_their_row(isa):
    matrix, _ = pack("q4_1", 40, 64)
    x = activations(4, 64)
    clean = _core.matmul(x, matrix, "int8")
    x[1, 3] = np.nan
    x[2, 40] = np.inf
    got = _core.matmul(x, matrix, "int8")
    assert np.isnan(got[1]).all() and np.isnan(got[2]).all()
    np.testing.assert_array_equal(got[[0, 3]], clean[[0, 3]])


def test_no_rows(isa):
    matrix, _ = pack("q4_0", 40, 64)
    assert _core.matmul(np.zeros((0, 64), np.float32), matrix).shape == (0, 40)


def test_errors():
    matrix, _ = pack("q4_0", 40, 64)
    x = activations(2, 64)
    for wrong in (x.astype(np.float64), x[:, ::2], x[:, :32].copy(), x[0]):
        with pytest.raises(_core.InvalidArgumentError, match=r"\[matmul\] x: expected"):
            _core.matmul(wrong, matrix)
    with pytest.raises(_core.InvalidArgumentError, match="arithmetic: expected int8"):
        _core.matmul(x, matrix, "int4")
    with pytest.raises(_core.InvalidArgumentError, match=r"bias: expected shape \[40\]"):
        _core.matmul(x, matrix, bias=np.zeros(39, np.float32))
    dense, _ = pack("f32", 40, 64)
    with pytest.raises(_core.UnsupportedError, match="dense weights need f32 or bf16"):
        _core.matmul(x, dense, "int8")
    data = random_weight("q4_0", 4, 64)
    with pytest.raises(_core.InvalidArgumentError, match="expected 180 bytes"):
        _core.PackedMatrix(data, "q4_0", (5, 64))
    with pytest.raises(_core.InvalidArgumentError, match="dtype: expected a weight type"):
        _core.PackedMatrix(data, "i8", (4, 36))


@pytest.mark.parametrize("dtype", ["tq1_0", "tq2_0"])
def test_ternary_products(dtype: str) -> None:
    data = random_weight(dtype, 33, 512)
    if dtype == "tq2_0":
        codes = data.reshape(33, 2, 66)
        codes[:, :, :64] &= 0xAA  # 0 and 2
    values = _core.dequantize(dtype, data, (33, 512))
    x = activations(5, 512)
    q, scales = ops.quantize_tokens(x)
    assert (np.abs(scales[:, None] * q - x) <= scales[:, None] * 0.5001).all()
    expected = (scales[:, None].astype(np.float64) * q) @ values.T.astype(np.float64)
    results = []
    for packing in ("t2", "t1_6"):
        matrix = ops.pack(data, dtype, (33, 512), ternary=packing)
        assert matrix.format == f"{packing}/group"
        np.testing.assert_array_equal(matrix.unpack(), values)
        for level in available_isas():
            with isa_level(level):
                for method in ("auto", "integer", "lookup"):
                    if method == "lookup" and level == "portable":
                        continue
                    results.append(ops.quantized_matmul(x, matrix, "int8_token", method=method))
    magnitude = dot_magnitude(scales[:, None] * q, values)
    assert_close(results[0], expected, magnitude=magnitude)
    for result in results:
        np.testing.assert_array_equal(result, results[0])


def test_ternary_refusals() -> None:
    data = random_weight("tq2_0", 16, 256) & 0x55
    plain = ops.pack(data, "tq2_0", (16, 256))
    x = activations(1, 256)
    with pytest.raises(_core.UnsupportedError, match="t2 or t1_6"):
        ops.quantized_matmul(x, plain, "int8_token")
    packed = ops.pack(data, "tq2_0", (16, 256), ternary="t2")
    with pytest.raises(_core.UnsupportedError, match="weight format"):
        ops.quantized_matmul(x, packed, "int8")
    with isa_level("portable"), pytest.raises(_core.UnsupportedError, match="lookup at portable"):
        ops.quantized_matmul(x, packed, "int8_token", method="lookup")
    with pytest.raises(_core.InvalidArgumentError, match="not int8_token"):
        ops.quantized_matmul(x, plain, method="lookup")
    with pytest.raises(_core.InvalidArgumentError, match="auto, integer or lookup"):
        ops.quantized_matmul(x, packed, "int8_token", method="table")
    with pytest.raises(_core.InvalidArgumentError, match="expected t2 or t1_6"):
        ops.pack(data, "tq2_0", (16, 256), ternary="t3")
    data[0, 0] = 3
    with pytest.raises(_core.InvalidArgumentError, match="codes 0, 1 and 2"):
        ops.pack(data, "tq2_0", (16, 256), ternary="t2")

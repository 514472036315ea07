"""Quantisers: against the gguf package's where it has them, by the error that they report and by
what the formats allow elsewhere; ternary types against their definition."""

import gguf
import numpy as np
import pytest

from effinfer import _core

BLOCKS = {
    "q8_0": 32, "q4_0": 32, "q4_1": 32, "q5_0": 32, "q5_1": 32, "q4_k": 256, "q5_k": 256,
    "q6_k": 256, "tq1_0": 256, "tq2_0": 256, "i2_s": 128, "f32": 1, "f16": 1, "bf16": 1,
}  # fmt: skip
TERNARY = ["tq1_0", "tq2_0", "i2_s"]
SAME_AS_GGUF = ["q8_0", "f16", "bf16"]
SEARCHED = ["q4_0", "q4_1", "q5_0", "q5_1"]
# Relative error on normal numbers, 2% above what the search reaches. For comparison: an optimal
# uniform quantiser of 16 and 32 levels without any cost of scales has 0.107 and 0.059 over the
# whole distribution; fitted to each 32 numbers it has less.
NORMAL_ERROR = {"q4_k": 0.0714, "q5_k": 0.0352, "q6_k": 0.0176}


def distributions(shape):
    rng = np.random.default_rng(11)
    yield rng.standard_normal(shape).astype(np.float32)
    yield (rng.laplace(size=shape) * 1e-3).astype(np.float32)
    yield (rng.standard_t(3, size=shape) + 2).astype(np.float32)
    yield -np.abs(rng.standard_normal(shape)).astype(np.float32)


def relative_error(new, old):
    difference = new.astype(np.float64) - old
    return np.sqrt((difference**2).sum() / (old.astype(np.float64) ** 2).sum())


def round_trip(dtype, values, **options):
    data, error = _core.quantize(dtype, values, **options)
    return _core.dequantize(dtype, data, values.shape), error


def gguf_type(dtype):
    return gguf.GGMLQuantizationType[dtype.upper()]


@pytest.mark.parametrize("dtype", SAME_AS_GGUF)
def test_same_bytes_as_the_gguf_package(dtype):
    for values in distributions((7, 512)):
        expected = gguf.quants.quantize(values, gguf_type(dtype)).view(np.uint8).ravel()
        assert np.array_equal(_core.quantize(dtype, values)[0], expected)


@pytest.mark.parametrize("dtype", SEARCHED)
def test_less_error_than_the_gguf_package(dtype):
    for values in distributions((32, 512)):
        theirs = gguf.quants.quantize(values, gguf_type(dtype))
        expected = relative_error(gguf.quants.dequantize(theirs, gguf_type(dtype)), values)
        assert relative_error(round_trip(dtype, values)[0], values) < 0.99 * expected


@pytest.mark.parametrize("dtype", NORMAL_ERROR)
def test_error_of_normal_numbers(dtype):
    values = next(distributions((64, 1024)))
    assert relative_error(round_trip(dtype, values)[0], values) < NORMAL_ERROR[dtype]
    # gguf decodes the same values.
    data = _core.quantize(dtype, values)[0].reshape(64, -1)
    theirs = gguf.quants.dequantize(data, gguf_type(dtype))
    assert np.array_equal(theirs, _core.dequantize(dtype, data, values.shape))


@pytest.mark.parametrize("dtype", BLOCKS)
def test_reported_error_is_that_of_the_bytes(dtype):
    for values in distributions((3, 1024)):
        decoded, error = round_trip(dtype, values)
        assert error == pytest.approx(relative_error(decoded, values), rel=1e-6)
        assert (error == 0) == (dtype == "f32")


@pytest.mark.parametrize("dtype", BLOCKS)
@pytest.mark.parametrize("shape", [(1, 256), (0, 256), (3, 0), (2, 3, 512), (300, 768)])
def test_any_shape_and_number_of_threads(dtype, shape):
    values = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
    outputs = [
        _core.quantize(dtype, values, pool=_core.ThreadPool(threads, oversubscribe=True))
        for threads in (1, 3)
    ]
    assert np.array_equal(outputs[0][0], outputs[1][0]) and outputs[0][1] == outputs[1][1]
    assert _core.dequantize(dtype, outputs[0][0], shape).shape == shape


@pytest.mark.parametrize("dtype", [name for name in BLOCKS if name not in ("f32", "f16", "bf16")])
def test_blocks_that_are_hard_to_scale(dtype):
    rng = np.random.default_rng(9)
    rows = np.zeros((7, 256), np.float32)
    rows[1] = 0.25  # constant
    rows[2] = -3.0
    rows[3, 17] = 40.0  # one value among zeros
    rows[4] = rng.standard_normal(256) * 1e-30  # below every float16
    rows[5] = np.where(rng.random(256) < 0.5, 1.0, -1.0)
    rows[6] = 100.0 + rng.standard_normal(256) * 0.01  # an offset that hides the rest
    for row in rows:
        decoded, error = round_trip(dtype, row[None])
        assert np.isfinite(decoded).all() and np.isfinite(error)
        assert np.abs(decoded - row).max() <= np.abs(row).max() * 1.0001
    assert np.array_equal(round_trip(dtype, rows[:1])[0], rows[:1])
    assert np.abs(round_trip(dtype, rows[5:6])[0] - rows[5:6]).max() < 2**-9  # scales are float16


@pytest.mark.parametrize("dtype", ["q4_k", "q5_k", "q6_k"])
def test_k_types_use_the_range_of_each_sub_block(dtype):
    """Sub-blocks of very different size keep their own precision."""
    sizes = np.repeat(2.0 ** -np.arange(8), 32)
    values = (np.random.default_rng(3).standard_normal((16, 256)) * sizes).astype(np.float32)
    decoded, _ = round_trip(dtype, values)
    for j in range(5):
        part = np.s_[:, 32 * j : 32 * j + 32]
        assert relative_error(decoded[part], values[part]) < 1.5 * NORMAL_ERROR[dtype]


def ternary_matrix(scale, shape=(5, 768), seed=0):
    digits = np.random.default_rng(seed).integers(-1, 2, shape)
    return (np.float32(scale) * digits).astype(np.float32)


@pytest.mark.parametrize("source", [*TERNARY, "f32", "f16", "bf16"])
@pytest.mark.parametrize("target", TERNARY)
def test_ternary_tensors_keep_their_values(source, target):
    values = ternary_matrix(0.0390625)
    data, error = _core.quantize(source, values)
    assert error == 0
    again, error = _core.quantize(target, data, source_dtype=source, shape=values.shape)
    assert error == 0 and np.array_equal(_core.dequantize(target, again, values.shape), values)
    if target != "i2_s":
        theirs = gguf.quants.quantize(values, gguf_type(target))
        assert np.array_equal(theirs.ravel(), again)


def test_i2_s_keeps_a_scale_that_float16_rounds():
    values = ternary_matrix(0.1)
    assert round_trip("i2_s", values)[1] == 0
    decoded, error = round_trip("tq2_0", values)
    assert 0 < error < 2**-11 and np.array_equal(np.sign(decoded), np.sign(values))


@pytest.mark.parametrize("target", ["tq1_0", "tq2_0"])
def test_a_scale_a_block(target):
    values = np.concatenate([ternary_matrix(s, (3, 256)) for s in (0.5, 2.0, 0.125)], axis=1)
    assert round_trip(target, values)[1] == 0
    with pytest.raises(_core.InvalidArgumentError, match="i2_s: expected values of one scale"):
        _core.quantize("i2_s", values)


@pytest.mark.parametrize("target", TERNARY)
def test_other_tensors_become_ternary_by_their_mean(target):
    values = np.random.default_rng(1).standard_normal((40, 512)).astype(np.float32) * 0.02
    mean = np.abs(values).mean(dtype=np.float64)
    expected = np.clip(np.rint(values / mean), -1, 1)
    decoded, _ = round_trip(target, values)
    scale = np.float32(mean) if target == "i2_s" else np.float32(np.float16(mean))
    assert np.array_equal(decoded, (scale * expected).astype(np.float32))


def test_weights_of_a_source():
    weights = _core.MemoryWeights()
    values = np.random.default_rng(2).standard_normal((6, 256)).astype(np.float32)
    weights.add("w", _core.quantize("q8_0", values)[0], "q8_0", values.shape)
    data, error = _core.quantize_weight(weights, "w", "q6_k")
    eight = round_trip("q8_0", values)[0]
    assert error == pytest.approx(
        relative_error(_core.dequantize("q6_k", data, values.shape), eight), rel=1e-6
    )
    with pytest.raises(_core.InvalidArgumentError, match="no weight named"):
        _core.quantize_weight(weights, "v", "q6_k")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", BLOCKS)
def test_numbers_that_are_not_finite(dtype, value):
    values = np.ones((2, 512), np.float32)
    values[1, 300] = value
    with pytest.raises(_core.InvalidArgumentError, match="expected finite numbers"):
        _core.quantize(dtype, values)


@pytest.mark.parametrize(
    ("dtype", "values", "message"),
    [
        ("q2_k", np.ones((1, 256), np.float32), "dtype: expected f32, f16"),
        ("act", np.ones((1, 256), np.float32), "dtype: expected f32, f16"),
        ("q9", np.ones((1, 256), np.float32), "q9"),
        ("q4_k", np.ones((2, 128), np.float32), "multiple of 256"),
        ("i2_s", np.ones((2, 64), np.float32), "multiple of 128"),
        ("f16", np.full((2, 64), 1e6, np.float32), "in the range of f16"),
        ("q4_0", np.full((2, 64), 3e38, np.float32), "in the range of q4_0"),
        ("q5_k", np.full((2, 256), 3e38, np.float32), "in the range of q5_k"),
        ("tq2_0", np.full((2, 256), 3e38, np.float32), "in the range of tq2_0"),
        ("q8_0", np.ones((2, 64), np.int32), "expected"),
    ],
)
def test_what_cannot_be_quantised(dtype, values, message):
    source = "i32" if values.dtype == np.int32 else "f32"
    with pytest.raises(_core.InvalidArgumentError, match=message):
        _core.quantize(dtype, values, source_dtype=source)


def test_which_types_are_written():
    for name in BLOCKS:
        assert _core.can_quantize_to(name)
    for name in ("q2_k", "iq4_nl", "i8", "act"):
        assert not _core.can_quantize_to(name)

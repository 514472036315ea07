"""The norms, over rows of every float type."""

import numpy as np
import pytest
import torch

from effinfer import InvalidArgumentError, _core, ops, testing
from tests.ops.rows import DTYPES, assert_rounded, random

SHAPES = [(1, 1), (1, 16), (2, 15), (3, 17), (5, 576), (2, 4097), (33, 64), (0, 8), (2, 3, 40)]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def wide(x):
    return x.astype(np.float64)


def rms(x, weight, eps=1e-6):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


@every_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_rmsnorm(isa, shape, dtype):
    x, weight = random(0, *shape, dtype=dtype, spread=3), random(1, shape[-1], dtype=dtype)
    # The sum of squares has no cancellation, and its relative error is halved by the root.
    expected = rms(wide(x), wide(weight), 1e-5)
    assert_rounded(ops.rmsnorm(x, weight, 1e-5), expected, dtype, terms=shape[-1])
    expected = rms(wide(x), 1 + wide(weight))
    scale = rms(np.abs(wide(x)), 1 + np.abs(wide(weight)))
    actual = ops.gemma_rmsnorm(x, weight)
    assert_rounded(actual, expected, dtype, terms=shape[-1], magnitude=scale)


@every_dtype
def test_weights_may_be_float32(isa, dtype):
    x, weight = random(2, 4, 100, dtype=dtype), random(3, 100)
    assert_rounded(ops.rmsnorm(x, weight), rms(wide(x), wide(weight)), dtype, terms=100)


@every_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_fused_add_rmsnorm(isa, shape, dtype):
    x, residual = (random(seed, *shape, dtype=dtype) for seed in (4, 5))
    weight = random(6, shape[-1], dtype=dtype)
    total = wide(x) + wide(residual)
    for op, offset in ((ops.fused_add_rmsnorm, 0), (ops.gemma_fused_add_rmsnorm, 1)):
        out, sums = x.copy(), residual.copy()
        assert op(out, sums, weight) is None
        assert_rounded(sums, total, dtype, magnitude=np.abs(wide(x)) + np.abs(wide(residual)))
        expected = rms(total, wide(weight) + offset)
        # Cancellation in the sum, a whole row's worth at most.
        row = np.sqrt(np.mean(total**2, axis=-1, keepdims=True) + 1e-6)
        scale = (np.abs(wide(x)) + np.abs(wide(residual))) / row * (np.abs(wide(weight)) + offset)
        assert_rounded(out, expected, dtype, terms=shape[-1], magnitude=scale)


@every_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_layernorm(isa, shape, dtype):
    x = random(7, *shape, dtype=dtype) + DTYPES[dtype][0](2)
    for weights in ("float32", dtype):
        gemma, beta = (random(seed, shape[-1], dtype=weights) for seed in (8, 9))
        centred = wide(x) - wide(x).mean(axis=-1, keepdims=True)
        deviation = np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + 1e-6)
        expected = centred / deviation * wide(gemma) + wide(beta)
        scale = np.abs(wide(x)) / deviation * np.abs(wide(gemma)) + np.abs(wide(beta))
        actual = ops.layernorm(x, gemma, beta)
        assert_rounded(actual, expected, dtype, terms=shape[-1], magnitude=scale)


@every_dtype
def test_results_are_those_of_torch(dtype):
    """One rounding at the end: torch agrees but for ties of the float32 arithmetic."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    x = x.to(getattr(torch, dtype))
    weight = torch.linspace(0.5, 2, 256).to(x.dtype)
    expected = torch.nn.functional.rms_norm(x.float(), (256,), weight.float(), 1e-6).to(x.dtype)
    out = torch.empty_like(x)
    assert ops.rmsnorm(x, weight, out=out) is out
    assert out.dtype == x.dtype
    same = (out == expected).float().mean()
    assert same > (0.3 if dtype == "float32" else 0.99)


@every_dtype
def test_strided_rows(isa, dtype):
    qkv = random(10, 7, 5, 96, dtype=dtype)
    weight = random(11, 32, dtype=dtype)
    for part in (qkv[:, 1:3, 32:64], qkv[:, 2, 64:], qkv[::3, ::2, :32], qkv[::-1, :, :32]):
        expected = ops.rmsnorm(part.copy(), weight)
        np.testing.assert_array_equal(ops.rmsnorm(part, weight), expected)
    x, residual = qkv.copy(), random(12, 7, 2, 32, dtype=dtype)
    dense, sums = x[:, :2, :32].copy(), residual.copy()
    ops.fused_add_rmsnorm(dense, sums, weight)
    ops.fused_add_rmsnorm(x[:, :2, :32], residual, weight)
    np.testing.assert_array_equal(x[:, :2, :32], dense)
    np.testing.assert_array_equal(residual, sums)
    np.testing.assert_array_equal(x[:, 2:], qkv[:, 2:])
    np.testing.assert_array_equal(x[..., 32:], qkv[..., 32:])


@every_dtype
def test_same_bits_at_every_isa_level_in_any_batch_and_team(dtype):
    x, weight = random(13, 50, 1001, dtype=dtype), random(14, 1001, dtype=dtype)
    expected = ops.rmsnorm(x, weight), ops.layernorm(x, weight, weight)
    for level in testing.available_isas():
        with testing.isa(level):
            for threads in (1, 3):
                pool = _core.ThreadPool(threads, oversubscribe=True)
                np.testing.assert_array_equal(ops.rmsnorm(x, weight, pool=pool), expected[0])
                normed = ops.layernorm(x, weight, weight, pool=pool)
                np.testing.assert_array_equal(normed, expected[1])
            np.testing.assert_array_equal(ops.rmsnorm(x[7:8], weight), expected[0][7:8])


def test_zeros_and_non_finite_rows(isa):
    x = np.zeros((3, 40), np.float32)
    x[1, 3], x[2, 5] = np.nan, np.inf
    for dtype in DTYPES:
        rows = x.astype(DTYPES[dtype][0])
        out = ops.rmsnorm(rows, np.ones(40, np.float32)).astype(np.float32)
        np.testing.assert_array_equal(out[0], 0)
        assert np.isnan(out[1]).all()
        assert np.isnan(out[2, 5])


def test_rounding_is_to_nearest_even(isa):
    """Against ml_dtypes and numpy, of values at and around every kind of tie."""
    bits = np.random.default_rng(15).integers(0, 2**31, 40000, np.int64).astype(np.uint32)
    bits[:10000] &= 0xFFFF8000
    bits[10000:20000] &= 0xFFFFF000
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    for dtype in ("float16", "bfloat16"):
        kind = DTYPES[dtype][0]
        # silu(60) = 60 up to rounding: a gate that multiplies by one float32 number.
        gate = np.full_like(values, 64.0).astype(kind)
        with np.errstate(over="ignore"):
            up = values.astype(kind)
            expected = (up.astype(np.float32) * np.float32(64)).astype(kind)
        x = np.stack([gate, up], axis=1)
        np.testing.assert_array_equal(ops.silu_and_mul(x)[:, 0], expected)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"weight": random(0, 7)}, r"weight: expected shape \[8\], got \[7\]"),
        ({"weight": random(0, 8, dtype="float16")}, r"weight: expected dtype f32, got f16"),
        ({"weight": random(0, 1, 8)}, r"weight: expected shape \[8\], got \[1, 8\]"),
        ({"weight": None}, r"weight: expected a numpy array.*got NoneType"),
        ({"input": np.array(1, np.float32)}, r"input: expected at least one dimension"),
        ({"input": np.zeros((2, 8), np.int32)}, r"input: expected dtype f32, f16 or bf16, got i32"),
        ({"input": np.zeros((2, 0), np.float32)}, r"input: expected a last dimension of at least"),
        (
            {"input": random(0, 2, 16)[:, ::2]},
            r"input: expected a contiguous last dimension, got a",
        ),
        ({"input": random(0, 2, 3, 4, 8)[:, ::2, ::2]}, r"input: expected leading dimensions with"),
        ({"eps": -1.0}, r"eps: expected a number >= 0"),
        ({"eps": np.nan}, r"eps: expected a number >= 0"),
        ({"out": random(0, 2, 7)}, r"out: expected float32 \(2, 8\), got float32 \(2, 7\)"),
        ({"out": random(0, 2, 8, dtype="float16")}, r"out: expected float32.*got float16"),
        ({"out": random(0, 4, 8)[::2]}, r"out: expected a C-contiguous array"),
    ],
)
def test_errors(kwargs, message):
    arguments = {"input": random(0, 2, 8), "weight": random(1, 8), **kwargs}
    with pytest.raises(InvalidArgumentError, match=r"\[rmsnorm\] " + message):
        ops.rmsnorm(**arguments)


def test_errors_of_what_is_written():
    x, weight = random(0, 2, 8), random(1, 8)
    broadcast = np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), (2, 8), (0, 4))
    for residual, message in [
        (random(0, 1, 8), r"residual: expected shape \[2, 8\], got \[1, 8\]"),
        (random(0, 2, 8, dtype="bfloat16"), "residual: expected dtype f32, got bf16"),
        (np.broadcast_to(x[:1], (2, 8)), "residual: expected a writable array"),
        (broadcast, "residual: expected an array without broadcast dimensions"),
    ]:
        with pytest.raises(InvalidArgumentError, match=r"\[fused_add_rmsnorm\] " + message):
            ops.fused_add_rmsnorm(x, residual, weight)
    with pytest.raises(InvalidArgumentError, match=r"\[layernorm\] beta: expected shape"):
        ops.layernorm(x, weight, random(0, 7))
    with pytest.raises(InvalidArgumentError, match=r"\[layernorm\] beta: expected dtype f32, got"):
        ops.layernorm(x.astype(np.float16), weight, weight.astype(np.float16))

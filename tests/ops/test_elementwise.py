"""Element-by-element operators and row selection."""

import math

import numpy as np
import pytest

from effinfer import _core, ops
from tests.tolerance import assert_close

SIZES = [0, 1, 2, 7, 15, 16, 17, 31, 33, 576, 4095, 4097, 9001]


def sigmoid(x):
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def gelu_tanh(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu(x):
    return np.array([v / 2 * math.erfc(-v / math.sqrt(2)) for v in x.reshape(-1)]).reshape(x.shape)


UNARY = {
    "silu": (ops.silu, lambda x: x * sigmoid(x)),
    "gelu": (ops.gelu, gelu),
    "gelu_tanh": (ops.gelu_tanh, gelu_tanh),
    "relu_squared": (ops.relu_squared, lambda x: np.maximum(x, 0) ** 2),
    "sigmoid": (ops.sigmoid, sigmoid),
    "softcap": (lambda x, **kw: ops.softcap(x, 30.0, **kw), lambda x: 30 * np.tanh(x / 30)),
    "scale": (lambda x, **kw: ops.scale(x, -1.7, **kw), lambda x: x * float(np.float32(-1.7))),
}
BINARY = {"add": (ops.add, np.add), "mul": (ops.mul, np.multiply)}


def random(seed, *shape, spread=5.0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(spread)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", UNARY)
def test_unary_matches_float64(isa, name, size):
    op, reference = UNARY[name]
    x = random(size, size)
    # silu and both gelus cancel for negative x (1 + tanh): errors are relative to |x| there.
    assert_close(op(x), reference(x.astype(np.float64)), magnitude=np.abs(x) + reference(x) ** 2)


@pytest.mark.parametrize("name", UNARY)
def test_unary_keeps_shape_and_element_values(isa, name):
    op, _ = UNARY[name]
    x = random(1, 3, 5, 37)
    flat = np.array([op(x.reshape(-1)[i : i + 1])[0] for i in range(0, x.size, 11)])
    out = op(x)
    assert out.shape == x.shape
    np.testing.assert_array_equal(out.reshape(-1)[::11], flat)


@pytest.mark.parametrize("name", UNARY)
def test_unary_extremes(isa, name):
    op, reference = UNARY[name]
    x = np.array([0.0, -0.0, 1e-30, -1e-30, 88.0, -88.0, 150.0, -150.0, 1e18, -1e18], np.float32)
    with np.errstate(over="ignore"):
        expected = reference(x.astype(np.float64))
    assert_close(op(x), expected, magnitude=np.abs(x) + np.abs(expected))
    assert np.isnan(op(np.array([np.nan], np.float32))).all()


def test_sigmoid_keeps_its_relative_precision(isa):
    # e^-x is within 2 units, of which 1 / (1 + e^-x) keeps at most all; the sum and the quotient
    # round once each: 3 eps of the result, below the 4 of assert_close.
    x = np.linspace(-110, 110, 20001, dtype=np.float32)
    out = ops.sigmoid(x)
    assert_close(out, sigmoid(x.astype(np.float64)))
    assert ((out >= 0) & (out <= 1)).all()
    assert (out[x > 16.7] == 1).all() and (out[x < -88.73] == 0).all()


def test_sigmoid_saturates(isa):
    x = np.array([np.inf, 3.4e38, 100, 0.0, -0.0, -100, -3.4e38, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(ops.sigmoid(x), [1, 1, 1, 0.5, 0.5, 0, 0, 0, np.nan])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", BINARY)
def test_binary_is_exact(isa, name, size):
    op, reference = BINARY[name]
    a, b = random(size, size), random(size + 1, size)
    np.testing.assert_array_equal(op(a, b), reference(a, b))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_thread_counts_agree(isa, threads):
    pool = _core.ThreadPool(threads, oversubscribe=True)
    x, y = random(2, 5, 5000), random(3, 5, 5000)
    for op, _ in UNARY.values():
        np.testing.assert_array_equal(op(x, pool=pool), op(x))
    for op, reference in BINARY.values():
        np.testing.assert_array_equal(op(x, y, pool=pool), reference(x, y))


@pytest.mark.parametrize(("rows", "cols", "picks"), [(1, 1, 1), (9, 37, 20), (4, 16, 0), (0, 8, 0)])
def test_select_rows(isa, rows, cols, picks):
    x = random(4, rows, cols)
    wanted = np.random.default_rng(5).integers(0, max(rows, 1), picks, np.int32)
    np.testing.assert_array_equal(ops.select_rows(x, wanted), x[wanted])


def test_strided_arrays_are_copied():
    x = random(6, 8, 10)
    np.testing.assert_array_equal(ops.add(x[:, ::2], x[:, 1::2]), x[:, ::2] + x[:, 1::2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.silu(np.zeros(3)), r"\[silu\] x: expected float32.*got float64"),
        (lambda: ops.silu(np.zeros(3, np.int32)), r"\[silu\] x: expected dtype f32, got i32"),
        (lambda: ops.silu(np.zeros([1] * 6, np.float32)), r"\[silu\] x: expected at most 5 dim"),
        (lambda: ops.softcap(random(0, 3), 0.0), r"\[softcap\] cap: expected a positive number"),
        (lambda: ops.softcap(random(0, 3), np.nan), r"\[softcap\] cap: expected a positive"),
        (lambda: ops.add(random(0, 3), random(0, 4)), r"\[add\] b: expected shape \[3\], got \[4"),
        (lambda: ops.mul(random(0, 3), np.zeros(3, np.int8)), r"\[mul\] b: expected dtype f32"),
        (
            lambda: ops.select_rows(random(0, 3, 2), np.array([0, 3], np.int32)),
            r"\[select_rows\] rows\[1\]: expected a value in \[0, 3\), got 3",
        ),
        (
            lambda: ops.select_rows(random(0, 3, 2), np.array([0], np.int64)),
            r"\[select_rows\] rows: expected dtype i32, got i64",
        ),
        (
            lambda: ops.select_rows(random(0, 3), np.array([0], np.int32)),
            r"\[select_rows\] x: expected 2 dimensions, got shape \[3\]",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(_core.InvalidArgumentError, match=message):
        call()

"""RMS norm, alone and after a residual addition."""

import numpy as np
import pytest

from effinfer import _core, ops, testing
from tests.tolerance import assert_close

SHAPES = [(1, 1), (1, 16), (2, 15), (3, 17), (5, 576), (2, 4097), (33, 64), (0, 8)]


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def reference(x, weight, eps, groups=1):
    wide = x.astype(np.float64).reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    out = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + eps)
    return (out if weight is None else out * weight.astype(np.float64)).reshape(x.shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_matches_float64(isa, shape):
    x, weight = random(0, *shape) * 3, random(1, shape[1])
    out = ops.rms_norm(x, weight, eps=1e-5)
    # The sum of squares has no cancellation, and its relative error is halved by the root.
    assert_close(out, reference(x, weight, 1e-5), terms=shape[1])


@pytest.mark.parametrize(("groups", "cols"), [(1, 64), (3, 64), (9, 5), (4, 256)])
def test_groups(isa, groups, cols):
    x, weight = random(2, 6, groups * cols), random(3, cols)
    out = ops.rms_norm(x, weight, groups=groups)
    assert_close(out, reference(x, weight, 1e-6, groups), terms=cols)
    heads = ops.rms_norm(x.reshape(-1, cols), weight)
    np.testing.assert_array_equal(out, heads.reshape(out.shape))


def test_without_weight(isa):
    x = random(4, 3, 100)
    assert_close(ops.rms_norm(x, None), reference(x, None, 1e-6), terms=100)


@pytest.mark.parametrize("shape", SHAPES)
def test_residual(isa, shape):
    x, residual, weight = random(5, *shape), random(6, *shape), random(7, shape[1])
    out, total = ops.add_rms_norm(x, residual, weight)
    np.testing.assert_array_equal(total, x + residual)
    np.testing.assert_array_equal(out, ops.rms_norm(x + residual, weight))


def test_same_bits_at_every_isa_level():
    x, weight = random(8, 7, 1000), random(9, 1000)
    results = []
    for level in testing.available_isas():
        with testing.isa(level):
            results.append(ops.rms_norm(x, weight))
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_same_bits_in_any_batch_and_team(isa):
    x, weight = random(10, 50, 201), random(11, 201)
    alone = np.concatenate([ops.rms_norm(x[i : i + 1], weight) for i in range(len(x))])
    for threads in (1, 2, 3):
        out = ops.rms_norm(x, weight, pool=_core.ThreadPool(threads, oversubscribe=True))
        np.testing.assert_array_equal(out, alone)


def test_zeros_and_non_finite_rows(isa):
    x = np.zeros((3, 40), np.float32)
    x[1, 3], x[2, 5] = np.nan, np.inf
    out = ops.rms_norm(x, np.ones(40, np.float32))
    np.testing.assert_array_equal(out[0], 0)
    assert np.isnan(out[1]).all()
    assert np.isnan(out[2, 5])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"weight": random(0, 7)}, r"\[rms_norm\] weight: expected shape \[8\], got \[7\]"),
        ({"weight": random(0, 8).astype(np.float16)}, r"weight: expected dtype f32, got f16"),
        ({"weight": random(0, 1, 8)}, r"weight: expected shape \[8\], got \[1, 8\]"),
        ({"x": np.array(1, np.float32)}, r"x: expected at least one dimension"),
        ({"x": np.zeros((2, 8), np.int32)}, r"x: expected dtype f32, got i32"),
        ({"x": np.zeros((2, 0), np.float32)}, r"x: expected a last dimension of 1 equal groups"),
        ({"groups": 3}, r"x: expected a last dimension of 3 equal groups, got shape \[2, 8\]"),
        ({"groups": 0}, r"groups: expected at least 1, got 0"),
        ({"eps": -1.0}, r"eps: expected a number >= 0"),
        ({"eps": np.nan}, r"eps: expected a number >= 0"),
    ],
)
def test_errors(kwargs, message):
    arguments = {"x": random(0, 2, 8), "weight": random(1, 8), **kwargs}
    with pytest.raises(_core.InvalidArgumentError, match=message):
        ops.rms_norm(**arguments)


def test_residual_of_another_shape_is_an_error():
    with pytest.raises(_core.InvalidArgumentError, match=r"\[add_rms_norm\] residual: expected sh"):
        ops.add_rms_norm(random(0, 2, 8), random(0, 1, 8), None)

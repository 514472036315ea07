"""Scores that rise, jump, fall and stay away while the keys go by: the softmax keeps an old maximum
until a score exceeds it by enough, and starts anew at fixed tokens of the sequence."""

import numpy as np
import pytest

from effinfer import ops
from tests.ops.batches import as_dtype, offsets, values_of
from tests.ops.reference import assert_attention, attend, seen
from tests.ops.test_decode import bf16_products

LENGTH, ROWS, DIM = 700, 70, 64
PLACES = np.arange(LENGTH)
# What each key adds to the scores of all rows.
COURSES = {
    "level": np.zeros(LENGTH),
    "creeps up, 3 a unit": 3.0 * (PLACES // 64),
    "climbs, 9 a unit": 9.0 * (PLACES // 64),
    "rises key by key": 0.25 * PLACES,
    "falls": -0.25 * PLACES,
    "one key above all": np.where(PLACES == 333, 60.0, 0.0),
    "just below and above a rescaling": 7.9 * (PLACES // 64) + 0.2 * (PLACES // 128),
    "far below zero": -5000.0 + 7.0 * (PLACES // 64),
}


def case(course, dtype, rows=ROWS):
    """Queries whose first number is 1, and keys whose first one is the course."""
    rng = np.random.default_rng(7)
    q, k, v = (rng.standard_normal((LENGTH, heads, DIM), np.float32) for heads in (6, 2, 2))
    q[..., 0], k[..., 0] = 1.0, COURSES[course][:, None]
    return [as_dtype(x, dtype) for x in (q[-rows:], k, v)]


def run(q, k, v, rows, first=0):
    length = LENGTH - ROWS + first + rows if rows < ROWS else LENGTH
    wrapper = ops.BatchPrefillWithRaggedKVCacheWrapper(None)
    wrapper.plan(offsets([rows]), offsets([length]), 6, 2, DIM, causal=True, sm_scale=1.0)
    q = q[first : first + rows]
    return wrapper.run(q, k[:length], v[:length], return_lse=True, lse_base="ln")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("course", COURSES)
def test_courses(isa, course, dtype):
    q, k, v = case(course, dtype)
    out, lse = run(q, k, v, ROWS)
    exact = [values_of(x, dtype) for x in (q, k, v)]
    expected = attend(*exact, seen(ROWS, LENGTH, causal=True), sm_scale=1.0)
    products = bf16_products(dtype, dtype)
    assert_attention(
        values_of(out, dtype), lse, expected, dtype=dtype, bf16_products=products, lse_base="ln"
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("course", COURSES)
def test_a_row_alone_has_the_same_bits(isa, course, dtype):
    q, k, v = case(course, dtype)
    out, lse = run(q, k, v, ROWS)
    for first, rows in ((0, 1), (33, 1), (3, 40), (69, 1)):
        alone, its_lse = run(q, k, v, rows, first)
        np.testing.assert_array_equal(alone, out[first : first + rows])
        np.testing.assert_array_equal(its_lse, lse[first : first + rows])

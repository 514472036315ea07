"""Rows of every float type, as numpy carries them, for the tests of operators over rows."""

import ml_dtypes
import numpy as np

from tests.tolerance import BF16_EPS, F16_EPS, F32_EPS, assert_close

DTYPES = {
    "float32": (np.float32, F32_EPS),
    "float16": (np.float16, F16_EPS),
    "bfloat16": (ml_dtypes.bfloat16, BF16_EPS),
}


def random(seed, *shape, dtype="float32", spread=1.0):
    values = np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(spread)
    return values.astype(DTYPES[dtype][0])


def assert_rounded(actual, expected, dtype, *, terms=1, magnitude=None):
    """`actual` is `expected` computed in float32 (a sum of `terms`) and rounded once to dtype."""
    assert actual.dtype == DTYPES[dtype][0]
    scale = np.abs(expected) if magnitude is None else magnitude
    # Half an ulp of the rounding, and subnormal float16, besides the error of the arithmetic.
    eps = 0.0 if dtype == "float32" else DTYPES[dtype][1] / 2
    tiny = 2.0**-25 if dtype == "float16" else 0.0
    exact = np.asarray(expected, np.float64)
    error = np.abs(actual.astype(np.float64) - exact)
    slack = np.maximum(error - eps * np.abs(exact) * 1.001 - tiny, 0)
    assert_close(exact + slack, exact, terms=terms, magnitude=scale)

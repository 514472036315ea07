"""How far a float32 result may lie from a float64 reference.

One float32 operation has a relative error of at most eps / 2. A result that adds n products has n
such errors, each relative to a partial sum that is at most `magnitude`, the sum of the absolute
values of the products. Rounding errors are close to independent with mean zero, so they grow as
sqrt(n), not n (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019):

    |result - reference| <= SAFETY * eps * sqrt(n) * magnitude

SAFETY = 4 covers the tail of the random walk and the few operations that follow the sum. Other
formats have their own epsilon: pass BF16_EPS where operands were rounded to bfloat16, 1 / 127 for
int8 blocks with `magnitude` built from the block maxima.
"""

import numpy as np
import numpy.typing as npt

F32_EPS = 2.0**-23
F16_EPS = 2.0**-10
BF16_EPS = 2.0**-7
SAFETY = 4.0
# Results may be flushed or lose bits below the smallest normal float32.
TINY = 2.0**-126


def dot_magnitude(x: npt.ArrayLike, w: npt.ArrayLike) -> np.ndarray:
    """The magnitude of x @ w.T: sums of absolute products, [..., N]."""
    return np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(w, np.float64)).T


def bound(magnitude: npt.ArrayLike, terms: int = 1, eps: float = F32_EPS) -> np.ndarray:
    """The largest error that a sum of `terms` products of that magnitude may have."""
    return SAFETY * eps * np.sqrt(max(terms, 1)) * np.asarray(magnitude, np.float64) + TINY


def assert_close(
    actual: npt.ArrayLike,
    expected: npt.ArrayLike,
    *,
    terms: int = 1,
    magnitude: npt.ArrayLike | None = None,
    eps: float = F32_EPS,
) -> None:
    """Asserts that `actual` equals the float64 `expected` within bound().

    `magnitude` (broadcast to the result; default |expected|) is what the errors are relative to:
    pass the sum of absolute products where terms cancel. NaNs and infinities must agree.
    """
    got = np.asarray(actual, np.float64)
    want = np.asarray(expected, np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    if want.size == 0:
        return
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    scale = np.broadcast_to(np.abs(want) if magnitude is None else magnitude, want.shape)
    error = np.abs(got - want)[finite]
    allowed = bound(scale[finite], terms, eps)
    # A NaN in `got` fails too: it compares false.
    bad = ~(error <= allowed)
    if bad.any():
        worst = int(np.argmax(np.where(bad, error / allowed, 0.0)))
        place = tuple(int(axis[worst]) for axis in np.nonzero(finite)) if want.ndim else ()
        raise AssertionError(
            f"{int(bad.sum())} of {want.size} values are out of tolerance; worst at {place}: "
            f"got {got[place]!r}, expected {want[place]!r}, "
            f"error {error[worst]:.3e}, allowed {allowed[worst]:.3e}"
        )

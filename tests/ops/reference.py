"""Attention written down: float64, one sequence at a time, every score in memory."""

from dataclasses import dataclass

import numpy as np

from tests.tolerance import BF16_EPS, F16_EPS, F32_EPS, SAFETY

OUTPUT_EPS = {"float32": F32_EPS, "float16": F16_EPS, "bfloat16": BF16_EPS}


@dataclass
class Expected:
    """Results of rows, and what their rounding errors are relative to."""

    out: np.ndarray  # [n, H, Dv]
    lse: np.ndarray  # [n, H], natural logarithm
    magnitude: np.ndarray  # [n, H, Dv]: sum of probability times |v|
    spread: np.ndarray  # [n, H]: the largest sum of |q k| of a score that counts, scaled
    terms: int

    def __getitem__(self, rows) -> "Expected":
        fields = (self.out, self.lse, self.magnitude, self.spread)
        return Expected(*(x[rows] for x in fields), self.terms)


def seen(n: int, m: int, causal: bool = False, window_left: int = -1) -> np.ndarray:
    """[n, m]: which keys the rows see; the rows are the last n of m positions."""
    row = np.arange(m - n, m)[:, None]
    key = np.arange(m)[None, :]
    mask = np.ones((n, m), bool)
    if causal:
        mask &= key <= row
    if window_left >= 0:
        mask &= key >= row - window_left
    return mask


def slopes(num_heads: int) -> np.ndarray:
    """ALiBi's, as its authors' code gives them (arXiv:2108.12409)."""

    def of_power(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]

    power = 2 ** int(np.floor(np.log2(num_heads)))
    return np.array(of_power(power) + of_power(2 * power)[::2][: num_heads - power])


def rotate(x: np.ndarray, positions: np.ndarray, theta: float, scale: float) -> np.ndarray:
    """Rotary embedding of pairs (i, i + D / 2) of x [n, H, D]."""
    half = x.shape[-1] // 2
    angles = positions[:, None] / scale * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = x[..., :half].astype(np.float64), x[..., half:].astype(np.float64)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    mask: np.ndarray,
    *,
    sm_scale: float | None = None,
    soft_cap: float | None = None,
    alibi: bool = False,
    rope: tuple[float, float] | None = None,
    sinks: np.ndarray | None = None,
) -> Expected:
    """q [n, H, D], k and v [m, Hkv, D]; mask [n, m] or [H, n, m]; rope: (theta, scale); sinks [H]:
    logits of one more key without a value."""
    n, heads, dim = q.shape
    m, kv_heads = k.shape[:2]
    scale = dim**-0.5 if sm_scale is None else sm_scale
    rows, keys = np.arange(m - n, m), np.arange(m)
    if rope is not None:
        q, k = rotate(q, rows, *rope), rotate(k, keys, *rope)
    q = q.astype(np.float64)
    k = np.repeat(k.astype(np.float64), heads // kv_heads, axis=1)
    v = np.repeat(v.astype(np.float64), heads // kv_heads, axis=1)
    scores = np.einsum("nhd,mhd->hnm", q, k) * scale
    sizes = np.einsum("nhd,mhd->hnm", np.abs(q), np.abs(k)) * abs(scale)
    if rope is not None:
        # cos and sin of float32 angles: their error is that of the angle.
        sizes = sizes * (2.0 + max(m, n) / rope[1])
    if alibi:
        bias = slopes(heads)[:, None, None] * (keys[None, :] - rows[:, None])
        scores, sizes = scores + bias, sizes + np.abs(bias)
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
        sizes = sizes + soft_cap
    mask = np.broadcast_to(mask, scores.shape)
    scores = np.where(mask, scores, -np.inf)
    highest = scores.max(axis=-1, initial=-np.inf)
    if sinks is not None:
        highest = np.maximum(highest, sinks[:, None])
    shift = np.where(np.isfinite(highest), highest, 0.0)
    weights = np.exp(scores - shift[..., None])
    total = weights.sum(axis=-1)
    if sinks is not None:
        total = total + np.exp(sinks[:, None] - shift)
    p = weights / np.where(total == 0, 1, total)[..., None]
    with np.errstate(divide="ignore"):
        lse = shift + np.log(total)
    return Expected(
        np.einsum("hnm,mhd->nhd", p, v),
        lse.T,
        np.einsum("hnm,mhd->nhd", p, np.abs(v)),
        np.where(mask, sizes, 0.0).max(axis=-1, initial=0.0).T,
        dim + m,
    )


def join(parts: list[Expected]) -> Expected:
    """The rows of all parts."""
    fields = ("out", "lse", "magnitude", "spread")
    joined = (np.concatenate([getattr(part, name) for part in parts]) for name in fields)
    return Expected(*joined, max(part.terms for part in parts))


def assert_attention(
    out: np.ndarray,
    lse: np.ndarray | None,
    expected: Expected,
    *,
    dtype: str = "float32",
    lse_base: str = "log2",
    bf16_products: bool = False,
    roundings: int = 1,
) -> None:
    """Within what float32 sums and the rounding of the result to `dtype` may do.

    Args:
        bf16_products: probabilities are rounded to bfloat16 before they meet the values.
        roundings: how often results were rounded to `dtype`: once a merge.
    """
    assert out.shape == expected.out.shape
    # A score's error is relative to the sum of absolute products, and moves a probability by as
    # much, in relative terms.
    score_error = F32_EPS * np.sqrt(expected.terms) * (1.0 + expected.spread)
    allowed = SAFETY * score_error[..., None] * expected.magnitude
    if bf16_products:
        allowed += SAFETY * BF16_EPS / 2 * expected.magnitude
    subnormal = 2.0**-24 if dtype == "float16" else 2.0**-126
    allowed += roundings * (OUTPUT_EPS[dtype] * expected.magnitude + subnormal)
    error = np.abs(out.astype(np.float64) - expected.out)
    _assert_within(error, allowed, "out")
    if lse is None:
        return
    assert lse.dtype == np.float32
    assert lse.shape == expected.lse.shape
    want = expected.lse / (np.log(2.0) if lse_base == "log2" else 1.0)
    empty = np.isneginf(expected.lse)
    np.testing.assert_array_equal(np.isneginf(lse), empty)
    bound = SAFETY * (score_error + F32_EPS * np.abs(np.where(empty, 0, want))) * 2
    if bf16_products:
        bound += SAFETY * BF16_EPS / 2
    _assert_within(np.abs(np.where(empty, 0, lse - np.where(empty, 0, want))), bound, "lse")


def _assert_within(error: np.ndarray, allowed: np.ndarray, name: str) -> None:
    bad = ~(error <= allowed)
    if bad.any():
        worst = np.unravel_index(np.argmax(np.where(bad, error / allowed, 0)), error.shape)
        raise AssertionError(
            f"{name}: {int(bad.sum())} of {bad.size} are out of tolerance; worst at {worst}: "
            f"error {error[worst]:.3e}, allowed {allowed[worst]:.3e}"
        )

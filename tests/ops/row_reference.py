"""The filters of rows in float64, by sorting; and a chi-squared test of draws."""

import numpy as np


def order(row):
    """Likeliest first, the lower id first among equals."""
    return np.lexsort((np.arange(len(row)), -row))


def softmax(x, temperature=1.0):
    x = np.asarray(x, np.float64) / temperature
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def restrict(p, tokens):
    out = np.zeros(len(p))
    out[tokens] = p[tokens]
    return out / out.sum()


def top_k(p, k):
    return restrict(p, order(p)[:k])


def top_p(p, mass):
    ranked = order(p)
    sums = np.cumsum(p[ranked])
    return restrict(p, ranked[: int(np.searchsorted(sums, mass * sums[-1])) + 1])


def min_p(p, ratio):
    return restrict(p, np.flatnonzero(p >= ratio * p.max()))


def joint(p, k, mass):
    return restrict(p, np.flatnonzero((top_k(p, k) > 0) & (top_p(p, mass) > 0)))


def assert_follows(draws, expected):
    """Draws of one distribution against its probabilities, at five standard deviations."""
    counts = np.bincount(draws, minlength=len(expected))
    expected = expected / expected.sum() * len(draws)
    assert not counts[expected == 0].any()
    # Cells of at least five expected draws; the rest form one cell.
    large = expected >= 5
    cells = np.append(expected[large], expected[~large].sum())
    seen = np.append(counts[large], counts[~large].sum())
    cells, seen = cells[cells > 0], seen[cells > 0]
    freedom = len(cells) - 1
    if freedom == 0:
        return
    chi_squared = ((seen - cells) ** 2 / cells).sum()
    # Wilson and Hilferty: the cube root of chi^2 / freedom is close to normal.
    spread = 2 / (9 * freedom)
    assert chi_squared < freedom * (1 - spread + 5 * spread**0.5) ** 3

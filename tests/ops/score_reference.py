"""What keys get of attention, written down: float64, every probability in memory."""

import numpy as np

from tests.ops.reference import seen


def probabilities(
    q: np.ndarray, k: np.ndarray, mask: np.ndarray, soft_cap: float | None = None
) -> tuple[np.ndarray, float]:
    """[H, n, m] of q [n, H, D] and k [m, Hkv, D]; and the largest sum of |q k| of a score."""
    n, heads, dim = q.shape
    k = np.repeat(k.astype(np.float64), heads // k.shape[1], axis=1)
    q = q.astype(np.float64)
    scores = np.einsum("nhd,mhd->hnm", q, k) * dim**-0.5
    spread = np.einsum("nhd,mhd->hnm", np.abs(q), np.abs(k)).max(initial=0.0) * dim**-0.5
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
        spread += soft_cap
    scores = np.where(mask, scores, -np.inf)
    highest = scores.max(axis=-1, initial=-np.inf, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(highest), highest, 0.0))
    total = weights.sum(axis=-1, keepdims=True)
    return weights / np.where(total == 0, 1, total), spread


def by_distance(p: np.ndarray) -> np.ndarray:
    """[H, m]: sums of p [H, n, m] by distance from a row, one of the last n of m, to its key."""
    heads, n, m = p.shape
    out = np.zeros((heads, m))
    for row in range(n):
        position = m - n + row
        out[:, : position + 1] += p[:, row, position::-1]
    return out


def ragged(
    q: np.ndarray, k: np.ndarray, qo: np.ndarray, kv: np.ndarray, causal: bool, **options
) -> tuple[list[np.ndarray], float]:
    """Probabilities of each sequence, and the largest spread."""
    window = options.pop("window_left", -1)
    parts = []
    for rows, keys in zip(
        zip(qo, qo[1:], strict=False), zip(kv, kv[1:], strict=False), strict=True
    ):
        mask = seen(rows[1] - rows[0], keys[1] - keys[0], causal, window)
        parts.append(probabilities(q[slice(*rows)], k[slice(*keys)], mask, **options))
    return [p for p, _ in parts], max(spread for _, spread in parts)

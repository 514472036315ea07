"""How far one next-token distribution is from another."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

ROWS_AT_ONCE = 8  # float64 rows of a 262k vocabulary are 17 MB, which malloc does not map anew


@dataclass(frozen=True)
class Fidelity:
    """Over the positions of a text; natural logarithms."""

    positions: int
    kl_mean: float
    kl_max: float
    perplexity: float
    reference_perplexity: float
    top1_agreement: float

    @property
    def perplexity_error(self) -> float:
        return abs(self.perplexity / self.reference_perplexity - 1.0)


def kl_divergence(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(reference || other) of each row of two float64 log-probability matrices, in nats."""
    return (reference.exp() * (reference - other)).sum(-1)


def top2_gap(logits: torch.Tensor) -> torch.Tensor:
    """The lead of the best logit over the second best, a row each."""
    best = logits.topk(2, -1).values
    return best[..., 0] - best[..., 1]


def log_probabilities(logits: np.ndarray | torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(logits).double().log_softmax(-1)


@torch.inference_mode()
def compare(
    reference_rows: Callable[[slice], torch.Tensor],
    other_rows: Callable[[slice], np.ndarray | torch.Tensor],
    token_ids: list[int],
) -> Fidelity:
    """Compares logits of every position of a text, a block of rows at a time.

    Both callables return the logits [rows, vocab] of a slice of the positions.
    """
    total, worst, agreements = 0.0, 0.0, 0
    loss, reference_loss = 0.0, 0.0
    count = len(token_ids)
    for first in range(0, count, ROWS_AT_ONCE):
        rows = slice(first, min(first + ROWS_AT_ONCE, count))
        expected = log_probabilities(reference_rows(rows))
        actual = log_probabilities(other_rows(rows))
        divergence = kl_divergence(expected, actual)
        total += float(divergence.sum())
        worst = max(worst, float(divergence.max()))
        agreements += int((expected.argmax(-1) == actual.argmax(-1)).sum())
        following = torch.tensor(token_ids[rows.start + 1 : rows.stop + 1], dtype=torch.long)
        picked = torch.arange(len(following)), following
        reference_loss -= float(expected[picked].sum())
        loss -= float(actual[picked].sum())
    return Fidelity(
        positions=count,
        kl_mean=total / count,
        kl_max=worst,
        perplexity=math.exp(loss / max(count - 1, 1)),
        reference_perplexity=math.exp(reference_loss / max(count - 1, 1)),
        top1_agreement=agreements / count,
    )

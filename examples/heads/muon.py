"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): momentum whose matrices are made
orthogonal before they are a step, so that few steps turn all directions of a matrix and not its
strongest ones. Steps are as long as AdamW's (Liu et al. 2025, arXiv:2502.16982).
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

MOMENTUM, DECAY = 0.95, 0.01
ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # x -> a x + b x^3 + c x^5 takes (0, 1] near 1


def orthogonal(matrix: Tensor) -> Tensor:
    """The matrix with all its singular values near 1."""
    a, b, c = COEFFICIENTS
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix if wide else matrix.T
    x = x / (x.norm() + 1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x if wide else x.T


class Muon(torch.optim.Optimizer):
    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for matrix in group["params"]:
                state = self.state[matrix]
                momentum = state.setdefault("momentum", torch.zeros_like(matrix))
                momentum.lerp_(matrix.grad, 1 - MOMENTUM)
                step = orthogonal(matrix.grad.lerp(momentum, MOMENTUM))
                matrix.mul_(1 - group["lr"] * DECAY)
                matrix.add_(step, alpha=-group["lr"] * 0.2 * math.sqrt(max(matrix.shape)))

"""XAttention: Block Sparse Attention with Antidiagonal Scoring (Xu et al., arXiv:2503.16428).

The products of a block of rows with a block of keys are summed along antidiagonals, `stride` apart:
every row and every key is in one, and columns as well as diagonals cross them. A softmax over these
sums scores blocks, and a block of rows visits as few of the highest as add up to `threshold`
(section 2).
"""

from dataclasses import dataclass
from typing import Any

from effinfer import _core
from effinfer.techniques.prefill import SparsePrefill

STRIDES = (4, 8, 16, 32, 64)


@dataclass(frozen=True)
class XAttention(SparsePrefill):
    """
    Args:
        stride: rows and keys of an antidiagonal: 4, 8, 16, 32 or 64. Scoring costs 1 / stride of
            what all products do.
        threshold: the share of the scores that the visited blocks hold.
        sink_tokens, local_tokens: keys that are visited in any case, of the first and the nearest.
        min_tokens: a shorter prompt is attended to in full, and so is a step in which choosing
            would cost more than it is likely to save; 0: keys are chosen in any case.

    Throws InvalidArgumentError.
    """

    stride: int = 8
    threshold: float = 0.9
    sink_tokens: int = 1
    local_tokens: int = 0
    min_tokens: int = 2048

    def __post_init__(self) -> None:
        if self.stride not in STRIDES:
            raise _core.InvalidArgumentError(
                f"[XAttention] stride: expected one of {STRIDES}, got {self.stride}"
            )
        if not 0 < self.threshold <= 1:
            raise _core.InvalidArgumentError(
                f"[XAttention] threshold: expected more than 0, at most 1, got {self.threshold}"
            )

    def indices(self, layer: int, kv_heads: int) -> list[tuple[str, dict[str, Any]]]:
        options = {
            "stride": self.stride,
            "mass": self.threshold,
            "sink_tokens": self.sink_tokens,
            "local_tokens": self.local_tokens,
            "min_tokens": self.min_tokens,
        }
        return [("block_index", options)]

"""XAttention: Block Sparse Attention with Antidiagonal Scoring (Xu et al., arXiv:2503.16428).

The products of a block of rows with a block of keys are summed along antidiagonals, `stride` apart:
every row and every key is in one, and columns as well as diagonals cross them. A softmax over these
sums scores blocks, and a block of rows visits as few of the highest as add up to `threshold`
(section 2).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from effinfer.techniques.prefill import SparsePrefill, sparse_prefill
from effinfer.techniques.ranges import choice, integer, share
from effinfer.techniques.technique import Meta

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

    META: ClassVar[Meta] = sparse_prefill(
        "XAttention: Block Sparse Attention with Antidiagonal Scoring",
        "2503.16428",
        "blocks of 64 keys; one threshold for all heads, where the paper searches one for each",
        dense_limit={"threshold": 1.0},
        name="xattention",
    )

    stride: int = choice(8, STRIDES)
    threshold: float = share(0.9)
    sink_tokens: int = integer(1)
    local_tokens: int = integer(0)
    min_tokens: int = integer(2048)

    def indices(self, layer: int, kv_heads: int) -> list[tuple[str, dict[str, Any]]]:
        options = {
            "stride": self.stride,
            "mass": self.threshold,
            "sink_tokens": self.sink_tokens,
            "local_tokens": self.local_tokens,
            "min_tokens": self.min_tokens,
        }
        return [("block_index", options)]

"""Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling
(Luo et al., arXiv:2408.08696).

Every row of a step computes what may follow its token, and plain decoding throws all but one away.
Kept in a matrix [vocabulary, width], they are grown into a tree of drafts.
"""

from dataclasses import dataclass

from effinfer import _core


@dataclass(frozen=True)
class TokenRecycling:
    """
    Args:
        width: followers that are kept of each token; 8 bytes each.

    The paper's tree has a fixed shape of 80 nodes. Here it grows by the followers' probabilities,
    and the controller cuts it to the rows that pay.
    """

    width: int = 8

    def build(self) -> _core.Proposer:
        return _core.recycling_proposer(self.width)

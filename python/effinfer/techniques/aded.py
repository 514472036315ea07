"""Adaptive Draft-Verification for Efficient Large Language Model Decoding (Liu et al., ADED,
arXiv:2407.12021).

A matrix over pairs of tokens holds what the model answered after them, and moves towards each new
answer (section 3.1); a tree is grown from it.
"""

from dataclasses import dataclass

from effinfer import _core


@dataclass(frozen=True)
class ADED:
    """
    Args:
        width: followers that are kept of each pair.
        pairs: that are kept at most, 8 bytes a follower; the newest wins.
        memory: the share that an old answer keeps when a new one comes.

    The paper searches the tree with Monte Carlo rollouts; here it grows best first, which finds the
    likeliest nodes without them. Pairs that are not known fall back to their last token.
    """

    width: int = 8
    pairs: int = 1 << 16
    memory: float = 0.5

    def build(self) -> _core.Proposer:
        return _core.recycling_proposer(self.width, self.pairs, self.memory)

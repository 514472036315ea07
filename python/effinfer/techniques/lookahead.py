"""Break the Sequential Dependency of LLM Inference Using Lookahead Decoding (Fu et al.,
arXiv:2402.02057).

Tokens further ahead are guessed in a window of columns and refined in every step, as Jacobi
iteration would. The n-grams that a column passes through on its way are what is drafted.
"""

from dataclasses import dataclass

from effinfer import _core


@dataclass(frozen=True)
class Lookahead:
    """
    Args:
        width: columns of the window.
        length: tokens of an n-gram, as many rows a column and one.

    The paper's mask is a tree (its first tokens a chain, a branch below each), so its rows are
    drafts like others. The paper runs the window in every step. Here its rows (probes) run while
    what they brought lately is worth their cost, unless the controller is a number.
    """

    width: int = 4
    length: int = 3

    def build(self) -> _core.Proposer:
        return _core.lookahead_proposer(self.width, self.length)

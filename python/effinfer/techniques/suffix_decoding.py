"""SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications (Oliaro et al.,
arXiv:2411.04975).

A text often goes on as it did where its last tokens occurred before: in the prompt (edits,
summaries), in what was generated (lists, loops), in texts of earlier requests. The places with the
longest agreement vote for a tree of continuations.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from effinfer import _core


@dataclass(frozen=True)
class SuffixDecoding:
    """
    Args:
        shared_tokens: of the outputs of earlier requests, so many tokens are kept and looked up
            too; 0: a request sees its own text alone.
        corpus: token ids of documents to look up, -1 between two of them.

    The paper keeps suffix trees with counts; here hash chains of n-grams find the same places in
    bounded memory (40 to 80 bytes a token), and a place counts twice as much for each token more
    that agrees.
    """

    shared_tokens: int = 0
    corpus: Sequence[int] = field(default=())

    def build(self) -> _core.Proposer:
        return _core.suffix_proposer(self.shared_tokens, corpus=list(self.corpus))

"""Speculative Decoding for Multi-Sample Inference (Li et al., arXiv:2503.05330).

Samples of one prompt take the same ways through their reasoning. Each drafts from the texts of
those that run beside it; a token on which several agree gains weight.
"""

from dataclasses import dataclass

from effinfer import _core


@dataclass(frozen=True)
class MultiSample:
    """Run the samples together: `llm.generate([prompt] * 8, [SamplingParams(seed=i), ...])`. The
    paper aggregates in a graph of tokens; here matches in all texts vote for a tree."""

    def build(self) -> _core.Proposer:
        return _core.suffix_proposer(beside=True)

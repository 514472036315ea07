"""Speculative Decoding with Big Little Decoder (Kim et al. 2023, arXiv:2302.07863): a small model
writes, the large one takes over where the small one is unsure (fallback), and takes tokens back
that it finds too unlikely (rollback). Lossy: the text is of both.

The paper lets the small model write until it is unsure. Here it always drafts `length` tokens, is
cut before the first unsure one, and the large model looks at what is left in the same step that
gives its own next token. How unlikely a token is says the distribution that the request samples
from, so a greedy request (temperature 0) keeps only what the large model would have said.
"""

import math
import os
from dataclasses import dataclass
from typing import Any

from effinfer import _core
from effinfer.checkpoints.model_files import ModelFiles
from effinfer.speculation import DraftController, Speculation, Verifier
from effinfer.techniques.chain_proposer import check_sizes
from effinfer.techniques.draft_model import DraftModel


@dataclass(frozen=True)
class BiLD:
    """`LLM(large, draft_model=BiLD("small.gguf"))`; accepted drafts are the small model's tokens.

    Args:
        model: the small model, of the same vocabulary.
        fallback: probability below which the small model leaves a token to the large one.
        rollback: -log of the probability that the large model gives a token, above which it
            replaces it, with all that follow.
        length: tokens that the small model writes at most before the large one looks.
    """

    model: str | os.PathLike[str]
    fallback: float = 0.5
    rollback: float = 2.0
    length: int = 5

    def speculation(self, target: ModelFiles) -> Speculation:
        """Throws InvalidArgumentError for another vocabulary and for thresholds that cannot be."""
        check_sizes(self, {"length": 1})
        if not 0 <= self.fallback <= 1:
            raise _core.InvalidArgumentError(
                f"[BiLD] fallback: expected 0 to 1, got {self.fallback!r}"
            )
        if not self.rollback >= 0:
            raise _core.InvalidArgumentError(
                f"[BiLD] rollback: expected at least 0, got {self.rollback!r}"
            )
        small = DraftModel(self.model, length=self.length, adaptive=False).for_target(target)
        vocab_size = int(target.graph.metadata["vocab_size"])
        return Speculation(
            [small], Rollback(self.rollback, vocab_size), Fallback(self.fallback, self.length)
        )


class Fallback(DraftController):
    name = "fallback"

    def __init__(self, least: float, length: int) -> None:
        self._least, self._length = least, length

    def budget(self, view: dict[str, Any]) -> int:
        return self._length

    def choose(
        self, views: list[dict[str, Any]], drafts: list[_core.Draft], step: dict[str, int]
    ) -> list[list[int]]:
        return [self._sure(draft.scores) for draft in drafts]

    def _sure(self, scores: list[float]) -> list[int]:
        unsure = [node for node, score in enumerate(scores) if score < self._least]
        return list(range(unsure[0] if unsure else len(scores)))


class Rollback(Verifier):
    name = "rollback"
    guarantee = "lossy"
    needs_distributions = True

    def __init__(self, most: float, vocab_size: int) -> None:
        self._least, self._vocab_size = math.exp(-most), vocab_size

    def verify(self, draft: _core.Draft, rows: _core.TokenRows) -> None:
        row = 0
        for node, token in enumerate(draft.tokens):
            if rows.distribution(row, self._vocab_size)[token] < self._least:
                break
            if not rows.emit(row, token):
                return
            row = node + 1
        rows.emit(row, rows.sample(row))

"""Accelerating LLM Inference with Staged Speculative Decoding (Spector and Re 2023,
arXiv:2308.04623): the draft model is speculated too. N-grams of the text guess what it will draft,
and one step of it verifies them, so that a draft takes fewer steps than it has tokens.

The paper drafts a tree, and its n-grams come from a sample of the draft model's texts; here the
draft is a greedy chain, and the n-grams are those of the text at hand.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from effinfer import _core
from effinfer.checkpoints.model_files import ModelFiles, open_model
from effinfer.hub.progress import resolve_with_bar
from effinfer.techniques.chain_proposer import (
    ChainProposer,
    check_sizes,
    greedy_chain,
    probability,
)
from effinfer.techniques.draft_model import check_vocabulary
from effinfer.techniques.graph_steps import GraphSteps


@dataclass(frozen=True)
class StagedDraft:
    """`LLM(target, draft_model=StagedDraft("small.gguf"))`.

    Args:
        model: the draft model, as `LLM` takes it.
        length: of a draft at most.
        guesses: tokens that n-grams guess for a step of the draft model; 0: it is not speculated.
        least: a draft ends where it is less likely than that to be right as a whole.
        max_tokens: of all texts that are drafted for at once, in the draft model's cache.
    """

    model: str | os.PathLike[str]
    length: int = 8
    guesses: int = 4
    least: float = 0.3
    max_tokens: int = 8192

    def for_target(self, target: ModelFiles) -> Staged:
        """The proposer of one engine. Throws InvalidArgumentError for another vocabulary and for
        sizes that cannot be, and what opening a model throws."""
        check_sizes(self, {"length": 1, "guesses": 0, "max_tokens": 64})
        files = open_model(resolve_with_bar(self.model))
        check_vocabulary(target, files)
        steps = GraphSteps.of(files, files.graph, self.max_tokens)
        return Staged(steps, self)


class Staged(ChainProposer):
    name = "staged_draft"

    def __init__(self, steps: GraphSteps, recipe: StagedDraft) -> None:
        super().__init__(steps, recipe.length)
        self._guesses, self._least = recipe.guesses, recipe.least
        self.drafted = 0  # tokens
        self.draft_steps = 0  # of the draft model, in which they were drafted

    def draft(
        self, view: dict[str, Any], text: int, fresh: list[int], length: int
    ) -> _core.Draft | None:
        known = view["tokens"].tolist()
        draft: list[int] = []
        scores: list[float] = []
        while len(draft) < length and math.prod(scores) >= self._least:
            guess = look_up([*known, *draft], min(self._guesses, length - len(draft) - 1))
            logits = self.steps.feed(text, [*fresh, *guess], rows=len(guess) + 1)
            self.draft_steps += 1
            right = 0
            for row in logits:
                draft.append(int(row.argmax()))
                scores.append(probability(row, draft[-1]))
                if right == len(guess) or guess[right] != draft[-1]:
                    break
                right += 1
            self.steps.drop(text, len(guess) - right)
            fresh = draft[-1:]
        self.drafted += len(draft)
        return greedy_chain(draft, scores)


def look_up(tokens: list[int], most: int) -> list[int]:
    """What followed the latest earlier place of the last three tokens, or of the last two."""
    for size in (3, 2):
        last = tokens[-size:]
        for end in range(len(tokens) - 1, size - 1, -1) if most > 0 else ():
            if tokens[end - 1] == last[-1] and tokens[end - size : end] == last:
                return tokens[end : end + most]
    return []

"""PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model Adaptation (An et al. 2025,
arXiv:2504.18583): a draft model that was trained to, drafts all its tokens in one step, behind rows
of a mask token in place of those that it does not know.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from effinfer import _core
from effinfer.checkpoints.model_files import ModelFiles, open_model
from effinfer.hub.progress import resolve_with_bar
from effinfer.techniques.chain_proposer import ChainProposer, check_sizes, greedy_rows
from effinfer.techniques.draft_model import check_vocabulary
from effinfer.techniques.graph_steps import GraphSteps


@dataclass(frozen=True)
class PARD:
    """`LLM(target, draft_model=PARD("pard.gguf", mask=256))`.

    Args:
        model: a draft model that was trained with mask tokens, as `LLM` takes it.
        mask: their id, which is never drafted; one id for all of them, as in the paper.
        length: of a draft; one step of the draft model, whatever it is.
        max_tokens: of all texts that are drafted for at once, in the draft model's cache.

    The paper's training drops rows at random to be cheap; the recipe here trains all of them. It
    runs from Python, one request after the other.
    """

    model: str | os.PathLike[str]
    mask: int
    length: int = 4
    max_tokens: int = 8192

    def for_target(self, target: ModelFiles) -> ParallelDraft:
        """The proposer of one engine. Throws InvalidArgumentError for another vocabulary and for
        sizes that cannot be, and what opening a model throws."""
        check_sizes(self, {"length": 1, "mask": 0, "max_tokens": 64})
        files = open_model(resolve_with_bar(self.model))
        check_vocabulary(target, files)
        known = int(files.graph.metadata["vocab_size"])
        if self.mask >= known:
            raise _core.InvalidArgumentError(
                f"[PARD] mask: expected an id in 0..{known - 1}, got {self.mask}"
            )
        return ParallelDraft(GraphSteps.of(files, files.graph, self.max_tokens), self)


class ParallelDraft(ChainProposer):
    name = "pard"

    def __init__(self, steps: GraphSteps, recipe: PARD) -> None:
        super().__init__(steps, recipe.length)
        self._mask = recipe.mask

    def draft(
        self, view: dict[str, Any], text: int, fresh: list[int], length: int
    ) -> _core.Draft | None:
        masks = [self._mask] * (length - 1)
        logits = self.steps.feed(text, [*fresh, *masks], rows=length)
        self.steps.drop(text, len(masks))
        return greedy_rows(logits, [self._mask])

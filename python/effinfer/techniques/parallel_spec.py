"""ParallelSpec: Parallel Drafter for Efficient Speculative Decoding (Xiao et al. 2024,
arXiv:2410.05589): one decoder layer on the model's hidden states drafts all its tokens in one step,
from rows of trained masks behind the last token.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import effinfer.techniques.state_chain as chain
from effinfer import _core
from effinfer.checkpoints.model_files import ModelFiles
from effinfer.techniques.chain_proposer import check_sizes, greedy_rows
from effinfer.techniques.graph_copy import GraphCopy
from effinfer.techniques.graph_steps import GraphSteps
from effinfer.techniques.trained_parts import TrainedParts
from effinfer.techniques.vocab_trim import find_head


@dataclass(frozen=True)
class ParallelSpec:
    """`LLM(target, draft_model=ParallelSpec("parallel_spec.gguf"))`.

    Args:
        path: a file of this kind, trained for the target: a layer of its shape and masks.
        max_tokens: of all texts that are drafted for at once.

    The paper's drafters are those of Medusa and EAGLE; this is EAGLE's, as `Eagle` has it: its
    layer sees what was generated, not the prompt. A mask's row carries a trained vector in place of
    a hidden state, and the last token's embedding. A chain, where the paper grows a tree.
    """

    path: str | os.PathLike[str]
    max_tokens: int = 8192

    def for_target(self, target: ModelFiles) -> MaskRows:
        """The proposer of one engine. Throws InvalidArgumentError for a file of another kind or
        model, FormatError, FileError."""
        check_sizes(self, {"max_tokens": 64})
        parts = TrainedParts(self.path, "parallel_spec", target)
        weights = parts.beside(target.weights)
        copy = GraphCopy(target, weights, "parallel_spec")
        hidden = copy.ops.input("hidden", "f32", ["T", parts.fact("hidden_size")])
        read = copy.linear(hidden, "parallel_spec.hidden.weight")
        token = copy.linear(copy.take(copy.streams[0]), "parallel_spec.token.weight")
        x = copy.layer(
            len(copy.streams) - 2, copy.ops.add(read, token), prefix="parallel_spec", cache=0
        )
        graph = copy.finish(x, "parallel_spec.output_norm.weight")
        steps = GraphSteps.of(target, graph, self.max_tokens, weights=weights)
        return MaskRows(steps, parts.array("masks"), find_head(target.graph)["inputs"][0])


class MaskRows(chain.StateChain):
    name = "parallel_spec"

    def __init__(self, steps: GraphSteps, masks: chain.Array, hidden: str) -> None:
        super().__init__(steps, len(masks) + 1, {"hidden": hidden})
        self._masks = masks

    def draft(
        self, view: dict[str, Any], text: int, fresh: list[int], length: int
    ) -> _core.Draft | None:
        import numpy as np

        known = self.states(view, len(fresh))["hidden"]
        masks = self._masks[: length - 1]
        tokens = [*fresh, *fresh[-1:] * len(masks)]
        floats = {"hidden": np.concatenate([known, masks])}
        logits = self.steps.feed(text, tokens, length, floats=floats)
        self.steps.drop(text, len(masks))
        return greedy_rows(logits)

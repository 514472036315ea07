"""Parallel Decoding via Hidden Transfer for Lossless Large Language Model Acceleration (Wu et al.
2024, arXiv:2404.12022): a hidden state between two layers is turned into pseudo states of coming
tokens, which the layers that follow complete.
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

_STATE = "hidden_transfer.state"


@dataclass(frozen=True)
class HiddenTransfer:
    """`LLM(target, draft_model=HiddenTransfer("hidden_transfer.gguf"))`.

    Args:
        path: a file of this kind, trained for the target: a matrix for each token ahead.
        max_tokens: of all texts that are drafted for at once.

    In the paper the pseudo states run beside the text's own, in the target's step, at one layer for
    each token ahead. Here all begin at one layer, and the layers that follow it run once more for
    them, over a cache of their own that sees what was generated, not the prompt: that costs a step
    of those layers. A chain, where the paper grows a tree.
    """

    path: str | os.PathLike[str]
    max_tokens: int = 8192

    def _parts(self, target: ModelFiles) -> tuple[TrainedParts, str]:
        parts = TrainedParts(self.path, "hidden_transfer", target)
        streams, place = GraphCopy(target, target.weights, "streams").streams, parts.fact("exit")
        if place not in range(1, len(streams) - 1):
            raise _core.InvalidArgumentError(
                f"[HiddenTransfer] {self.path}: expected a layer of 1..{len(streams) - 2}, "
                f"got {place}"
            )
        return parts, streams[place]

    def extend(self, target: ModelFiles) -> ModelFiles:
        """The target that also returns the states. Throws as for_target() does."""
        return chain.with_row_outputs(target, {_STATE: self._parts(target)[1]})

    def for_target(self, target: ModelFiles) -> PseudoStates:
        """The proposer of one engine. Throws InvalidArgumentError for a file of another kind or
        model, FormatError, FileError."""
        check_sizes(self, {"max_tokens": 64})
        parts, stream = self._parts(target)
        copy = GraphCopy(target, target.weights, "hidden_transfer")
        state = copy.ops.input("state", "f32", ["T", parts.fact("hidden_size")])
        copy.known[stream] = state
        graph = copy.finish(copy.take(copy.streams[-1]))
        steps = GraphSteps.of(target, graph, self.max_tokens)
        return PseudoStates(steps, [parts.array(str(ahead)) for ahead in range(parts.count)])


class PseudoStates(chain.StateChain):
    name = "hidden_transfer"

    def __init__(self, steps: GraphSteps, transfer: list[chain.Array]) -> None:
        super().__init__(steps, len(transfer), {"state": _STATE})
        self._transfer = transfer

    def draft(
        self, view: dict[str, Any], text: int, fresh: list[int], length: int
    ) -> _core.Draft | None:
        import numpy as np

        known = self.states(view, len(fresh))["state"]
        pseudo = [matrix @ known[-1] for matrix in self._transfer[:length]]
        floats = {"state": np.concatenate([known, pseudo])}
        logits = self.steps.feed(text, [*fresh, *fresh[-1:] * length], length, floats=floats)
        self.steps.drop(text, length)
        return greedy_rows(logits)

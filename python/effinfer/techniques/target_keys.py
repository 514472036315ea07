"""Draft layers that attend to keys and values of the target, beside their own."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, ClassVar

import effinfer.techniques.state_chain as chain
from effinfer import _core
from effinfer.checkpoints.model_files import ModelFiles
from effinfer.graph import Value
from effinfer.techniques.chain_proposer import check_sizes, greedy_chain, probability
from effinfer.techniques.graph_copy import GraphCopy
from effinfer.techniques.graph_steps import GraphSteps
from effinfer.techniques.trained_parts import TrainedParts


@dataclass(frozen=True)
class TargetKeys:
    """
    Args:
        path: a file of this kind, trained for the target: a layer of its shape, and queries and an
            output matrix for the target's keys.
        length: of a draft; it ends before where it is less likely than `least` to be right.
        max_tokens: of all texts that are drafted for at once.
    """

    path: str | os.PathLike[str]
    length: int = 5
    least: float = 0.3
    max_tokens: int = 8192
    kind: ClassVar[str] = ""
    window: ClassVar[int] = -1  # tokens before its own that the layer's own keys are of; -1: all

    def extend(self, target: ModelFiles) -> ModelFiles:
        """The target that also returns what its last layer caches."""
        keys, values = _cached(GraphCopy(target, target.weights, self.kind))[1:]
        return chain.with_row_outputs(target, {f"{self.kind}.k": keys, f"{self.kind}.v": values})

    def for_target(self, target: ModelFiles) -> KeyChain:
        """The proposer of one engine. Throws InvalidArgumentError for a file of another kind or
        model, FormatError, FileError."""
        check_sizes(self, {"length": 1, "max_tokens": 64})
        parts = TrainedParts(self.path, self.kind, target)
        weights = parts.beside(target.weights)
        copy = GraphCopy(target, weights, self.kind)
        x = self._layer(copy, copy.take(copy.streams[0]))
        graph = copy.finish(x, f"{self.kind}.output_norm.weight")
        steps = GraphSteps.of(target, graph, self.max_tokens, weights=weights)
        return KeyChain(steps, self)

    def _layer(self, copy: GraphCopy, x: Value) -> Value:
        """Attention to what the layer cached, to what the target did, and the MLP."""
        last, half = len(copy.streams) - 2, copy.halves[len(copy.streams) - 2]
        x = copy.layer(last, x, prefix=self.kind, cache=0, until=half, window=self.window)
        handle, keys, values = _cached(copy)
        size = copy.graph.values[values]["shape"][1]
        names = {"k": keys, "v": values}
        known = {value: copy.ops.input(name, "f32", ["T", size]) for name, value in names.items()}
        x = copy.layer(last, x, cache=1, until=half, prefix=f"{self.kind}.cross", known=known)
        return copy.layer(last, x, prefix=self.kind, known={half: x})


def _cached(copy: GraphCopy) -> tuple[str, str, str]:
    """Of the last layer: the handle of its cache, keys before they are rotated, values."""
    (handle,) = copy.caches(len(copy.streams) - 2)
    makers = {node["outputs"][0]: node for node in copy.graph.nodes}
    keys, values = makers[handle]["inputs"]
    while makers[keys]["op"] == "rope":
        keys = makers[keys]["inputs"][0]
    return handle, keys, values


class KeyChain(chain.StateChain):
    """A token's row has what the target cached of the token before it; rows of guesses have zeros,
    as the target has not seen them."""

    def __init__(self, steps: GraphSteps, recipe: TargetKeys) -> None:
        outputs = {part: f"{recipe.kind}.{part}" for part in "kv"}
        super().__init__(steps, recipe.length, outputs)
        self.name, self._least = recipe.kind, recipe.least

    def draft(
        self, view: dict[str, Any], text: int, fresh: list[int], length: int
    ) -> _core.Draft | None:
        tokens, scores = list[int](), list[float]()
        floats = self.states(view, len(fresh))
        nothing = {name: value[:1] * 0 for name, value in floats.items()}
        while len(tokens) < length and math.prod(scores) >= self._least:
            row = self.steps.feed(text, tokens[-1:] or fresh, floats=floats)[-1]
            floats = nothing
            tokens.append(int(row.argmax()))
            scores.append(probability(row, tokens[-1]))
        self.steps.drop(text, len(tokens) - 1)
        return greedy_chain(tokens, scores)

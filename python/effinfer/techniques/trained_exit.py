"""What methods share that draft with the model's own first layers and a small trained part."""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from effinfer import _core
from effinfer.checkpoints.model_files import ModelFiles
from effinfer.graph import Value
from effinfer.techniques.draft_model import HeadRewrite
from effinfer.techniques.graph_copy import GraphCopy
from effinfer.techniques.trained_parts import TrainedParts


@dataclass(frozen=True)
class TrainedExit(ABC):
    """
    Args:
        path: a file of trained parts of this kind, for the target; heads.exit: the first layer that
            a draft does without.
        length, width, num_pages, adaptive: as `DraftModel` has them. head: a `VocabTrim`.
    """

    path: str | os.PathLike[str]
    length: int = 6
    width: int = 1
    num_pages: int = 0
    adaptive: bool = True
    head: HeadRewrite | None = None
    kind: ClassVar[str] = ""
    own_norm: ClassVar[bool] = True  # whether the file has a norm for the head

    @abstractmethod
    def leave(self, copy: GraphCopy, exit_layer: int) -> Value:
        """The stream that the head reads."""

    def for_target(self, target: ModelFiles) -> _core.Proposer:
        """The proposer of one engine. Throws InvalidArgumentError for parts of another kind or
        model, FormatError, FileError."""
        parts = TrainedParts(self.path, self.kind, target)
        weights: _core.WeightSource = parts.beside(target.weights)
        copy = GraphCopy(target, weights, self.kind)
        exit_layer = int(parts.fact("exit"))
        if exit_layer not in range(1, len(copy.streams) - 1):
            raise _core.InvalidArgumentError(
                f"[{type(self).__name__}] {self.path}: expected an exit of "
                f"1..{len(copy.streams) - 2}, got {exit_layer}"
            )
        norm = f"{self.kind}.output_norm.weight" if self.own_norm else ""
        graph = copy.finish(self.leave(copy, exit_layer), norm)
        if self.head is not None:
            graph, weights = self.head.apply(graph, weights)
        return _core.draft_model_proposer(
            graph,
            weights,
            of_target=True,
            length=self.length,
            width=self.width,
            num_pages=self.num_pages,
            adaptive=self.adaptive,
            label=self.kind,
        )

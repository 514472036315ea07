"""Drafts from rows with trained embeddings in the target's own step: behind a token they stand for
those that are not known yet, and the logits of such a row guess the token after its own."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

from effinfer import _core
from effinfer.checkpoints.model_files import ModelFiles
from effinfer.speculation import Proposer
from effinfer.techniques.chain_proposer import probability
from effinfer.techniques.extra_ids import with_extra_ids
from effinfer.techniques.trained_parts import TrainedParts

_PROBE = 2.0  # Draft::kProbe


@dataclass(frozen=True)
class ExtraRows:
    """
    Args:
        path: a file of this kind, trained for the target: embeddings of a group of rows. Their
            table in the target's dtype is a copy of the model's with these rows behind it.
    """

    path: str | os.PathLike[str]
    kind: ClassVar[str] = ""
    everywhere: ClassVar[bool] = True  # behind each node of a draft; else behind no draft

    def extend(self, target: ModelFiles) -> ModelFiles:
        """The target with ids for these rows. Throws as for_target() does."""
        return with_extra_ids(target, TrainedParts(self.path, self.kind, target).array("rows"))

    def for_target(self, target: ModelFiles) -> RowGroups:
        """The proposer of one engine, whose verifier must be `match`. Throws InvalidArgumentError
        for a file of another kind or model, FormatError, FileError."""
        parts = TrainedParts(self.path, self.kind, target)
        return RowGroups(self, int(parts.fact("vocab_size")), len(parts.array("rows")), parts.count)


class RowGroups(Proposer):
    """A chain of what the last group said, and groups for the next one."""

    top_k = 16

    def __init__(self, recipe: ExtraRows, vocab: int, size: int, ahead: int) -> None:
        self.name, self._everywhere = recipe.kind, recipe.everywhere
        self._ids, self._ahead = range(vocab, vocab + size), ahead
        self._next: dict[int, list[tuple[int, float]]] = {}

    def propose(self, views: list[dict[str, Any]]) -> list[_core.Draft | None]:
        return [self._draft(view) for view in views]

    def observe(self, facts: list[dict[str, Any]]) -> None:
        for fact in facts:
            draft = fact["verified"]
            self._next[fact["request"]] = said = []
            if draft is None:
                continue
            node = int(fact["accepted"][-1]) if len(fact["accepted"]) else -1
            for place, extra in enumerate(self._ids, self._ahead - len(self._ids)):
                node = draft.child(node, extra)
                if node < 0:
                    break
                if place >= 0:
                    values = fact["top_values"][node + 1]
                    said.append((int(fact["top_tokens"][node + 1][0]), probability(values, 0)))

    def forget(self, request: int) -> None:
        self._next.pop(request, None)

    def _draft(self, view: dict[str, Any]) -> _core.Draft:
        draft = _core.Draft()
        behind = [-1]
        for token, score in self._next.get(view["request"], [])[: view["max_nodes"]]:
            behind.append(draft.add(token, behind[-1], min(score, 1.0)))
        if len(behind) > 1 and not self._everywhere:
            return draft
        for node in behind:
            if len(draft.tokens) + len(self._ids) > view["max_nodes"]:
                break
            for extra in self._ids:
                node = draft.add(extra, node, _PROBE)
        return draft

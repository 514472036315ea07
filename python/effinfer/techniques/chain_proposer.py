"""What proposers share that run a draft model themselves, for drafts that the engine's own
DraftModel does not make: a text of the draft model for each request, and its end."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from effinfer import _core
from effinfer.speculation import Proposer, SpeculationWarning
from effinfer.techniques.graph_steps import GraphSteps

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class ChainProposer(Proposer):
    """Drafts chains. A request whose text outgrows the draft model's context or pages goes on
    without drafts, with one SpeculationWarning."""

    def __init__(self, steps: GraphSteps, length: int) -> None:
        self.steps, self.length = steps, length
        self._texts: dict[int, int] = {}
        self._gone: set[int] = set()

    @abstractmethod
    def draft(
        self, view: dict[str, Any], text: int, fresh: list[int], length: int
    ) -> _core.Draft | None:
        """`length` tokens for a request. `text` of the draft model lacks `fresh` of what the
        request has, one token at least; what is fed beyond that may stay."""

    def read(self, view: dict[str, Any]) -> list[int]:
        """What the draft model reads in place of the request's text."""
        tokens: list[int] = view["tokens"].tolist()
        return tokens

    def propose(self, views: list[dict[str, Any]]) -> list[_core.Draft | None]:
        return [self._draft(view) for view in views]

    def forget(self, request: int) -> None:
        self._gone.discard(request)
        if request in self._texts:
            self.steps.end(self._texts.pop(request))

    def _draft(self, view: dict[str, Any]) -> _core.Draft | None:
        request = view["request"]
        if request in self._gone:
            return None
        if request not in self._texts:
            self._texts[request] = self.steps.begin()
        text = self._texts[request]
        length = min(self.length, view["max_nodes"], view["max_depth"])
        try:
            return self.draft(view, text, self.steps.follow(text, self.read(view)), length)
        except (_core.OutOfMemoryError, _core.InvalidArgumentError) as error:
            self.forget(request)
            self._gone.add(request)
            warnings.warn(f"{error}; it goes on undrafted", SpeculationWarning, stacklevel=2)
            return None


def probability(row: npt.NDArray[np.float32], token: int) -> float:
    """Of a token by its row of logits."""
    import numpy as np

    return float(1 / np.exp(row - row[token]).sum(dtype=np.float64))


def check_sizes(owner: object, least: dict[str, int]) -> None:
    """Throws InvalidArgumentError for a field that is no integer of at least that."""
    for name, bound in least.items():
        value = getattr(owner, name)
        if type(value) is not int or value < bound:
            kind = type(owner).__name__
            raise _core.InvalidArgumentError(
                f"[{kind}] {name}: expected at least {bound}, got {value!r}"
            )


def greedy_chain(tokens: Sequence[int], scores: Sequence[float]) -> _core.Draft | None:
    return _core.Draft(list(tokens), scores=[min(s, 1.0) for s in scores]) if tokens else None


def greedy_rows(logits: npt.NDArray[np.float32], left_out: Sequence[int] = ()) -> _core.Draft:
    """A chain of the likeliest token of each row of [length, vocab], but for those left out."""
    logits[:, list(left_out)] = -float("inf")
    tokens = [int(token) for token in logits.argmax(1)]
    scores = [probability(row, token) for row, token in zip(logits, tokens, strict=True)]
    return _core.Draft(tokens, scores=[min(score, 1.0) for score in scores])

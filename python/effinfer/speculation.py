"""Speculative decoding: tokens are guessed and verified in the step that computes the next one.

    llm = effinfer.LLM("smollm2-135m", speculation="auto")
    llm = effinfer.LLM("smollm2-135m", speculation=Speculation([SuffixDecoding(), MyProposer()]))

With the default verifier a text is the same as without speculation; docs/speculation.md says why,
and when it is faster. Published proposers are in effinfer.techniques. Your own are classes here
with a Python method or two, which is called once a step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from effinfer import _core

Draft = _core.Draft


class SpeculationWarning(UserWarning):
    """A proposer's draft was refused; the request decodes without it."""


class Proposer(ABC):
    """Guesses what follows. A subclass may set `name`, `top_k` when observe() wants to see that
    many of the highest logits of each row, and `outputs` when it wants to see values of the model's
    graph, f32[R, size], by their names."""

    name = "proposer"
    top_k = 0
    outputs: Sequence[str] = ()

    @abstractmethod
    def propose(self, views: list[dict[str, Any]]) -> list[Draft | None]:
        """A draft, or None, for each of the requests that decode in this step. A view has
        request, tokens (int32 [n]: prompt and output), prompt_size, params, max_nodes, max_depth,
        draws (whether the verifier wants tokens that were drawn: Draft.draw, and a shape that does
        not depend on them) and same_text (whether the text is what plain decoding would draw with
        params.seed). What is raised leaves all of them undrafted."""

    def observe(self, facts: list[dict[str, Any]]) -> None:  # noqa: B027
        """Called after a step: request, tokens, prompt_size, num_emitted (of tokens, the last ones
        are new), proposed and verified (Draft or None), accepted (int32: nodes of verified), and
        top_values float32, top_tokens int32 [1 + len(verified), top_k], outputs (by name, float32
        [1 + len(verified), size])."""

    def forget(self, request: int) -> None:  # noqa: B027
        """The request has ended."""


class Verifier(ABC):
    """Accepts what it likes. `guarantee` is "same_text", "same_distribution" or "lossy";
    needs_distributions: whether verify() asks for distribution(); needs_probabilities: whether it
    makes use of Draft.candidates_of()."""

    name = "verifier"
    guarantee = "lossy"
    needs_distributions = False
    needs_probabilities = False

    @abstractmethod
    def verify(self, draft: Draft, rows: _core.TokenRows) -> None:
        """Emits at least one token."""


class DraftController(ABC):
    """Decides which nodes get a row in the step."""

    name = "controller"

    @abstractmethod
    def budget(self, view: dict[str, Any]) -> int:
        """Nodes to ask for; 0: nobody is asked."""

    @abstractmethod
    def choose(
        self, views: list[dict[str, Any]], drafts: list[Draft], step: dict[str, int]
    ) -> list[list[int]]:
        """The nodes of each draft that get a row, at most step["draft_rows"] of them beside
        step["plain_rows"], which give step["requests"] tokens. A node without its parent gets
        none."""

    def observe(self, step: dict[str, Any], facts: list[dict[str, Any]]) -> None:  # noqa: B027
        """Called after a step: rows, draft_rows, kv_tokens, seconds, propose_seconds, decoding."""


class ProposerRecipe(Protocol):
    """Makes a proposer for a model. Techniques are recipes: one may serve several models."""

    def build(self) -> _core.Proposer | Proposer: ...


class TargetRecipe(Protocol):
    """Makes a proposer for a model of which it needs the files (checkpoints.ModelFiles): heads and
    draft models. `LLM` asks it."""

    def for_target(self, target: Any) -> _core.Proposer: ...


VERIFIERS: dict[str, Callable[[], _core.Verifier]] = {
    "match": _core.match_verifier,
    "rejection": _core.rejection_verifier,
    "traversal": _core.traversal_verifier,
    "typical": _core.typical_verifier,
}


@dataclass(frozen=True)
class Speculation:
    """How a model speculates.

    Args:
        proposers: recipes of effinfer.techniques or Proposers; their drafts are merged and compete.
        verify: "match" (the text of plain decoding), "rejection" or "traversal" (texts of its
            distribution, of drafts that were drawn), "typical" (lossy), or a Verifier.
        controller: "cost" (nodes get rows while they are worth their measured cost), a number (so
            many nodes of each draft, whatever they cost), or a DraftController.

    Throws InvalidArgumentError when a model is made with it.
    """

    proposers: Sequence[ProposerRecipe | TargetRecipe | Proposer | _core.Proposer]
    verify: str | Verifier | _core.Verifier = "match"
    controller: str | int | DraftController | _core.DraftController = "cost"

    def build(self) -> _core.Speculation:
        """What an engine takes. Its parts keep the state of that engine's requests."""
        proposers = [_build(p) for p in self._proposers()]
        return _core.Speculation(proposers, self._verifier(), self._controller())

    def explain(self) -> str:
        """A line a part: what it is, and whether it runs in Python."""
        lines = [f"proposer {_describe(p)}" for p in self._proposers()]
        verifier = self._verifier()
        guarantee = getattr(verifier, "guarantee", "lossy")
        lines.append(f"verifier {_describe(verifier)}: {guarantee}")
        lines.append(f"controller {_describe(self._controller())}")
        return "\n".join(["speculation:", *(f"  {line}" for line in lines)])

    def _proposers(self) -> list[Any]:
        given = self.proposers
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise _core.InvalidArgumentError(
                f"[speculation] proposers: expected a list of them, got {given!r}"
            )
        for proposer in given:
            if isinstance(proposer, type):
                raise _core.InvalidArgumentError(
                    f"[speculation] proposers: expected objects, got the class {proposer.__name__}"
                )
        return list(given)

    def _verifier(self) -> Verifier | _core.Verifier:
        if self.verify is not None and not isinstance(self.verify, str):
            return self.verify
        if self.verify in VERIFIERS:
            return VERIFIERS[self.verify]()
        known = ", ".join(f'"{name}"' for name in VERIFIERS)
        raise _core.InvalidArgumentError(
            f"[speculation] verify: expected {known} or a Verifier, got {self.verify!r}"
        )

    def _controller(self) -> DraftController | _core.DraftController:
        controller = self.controller
        if controller is not None and not isinstance(controller, str | int):
            return controller
        if controller == "cost":
            return _core.cost_controller()
        if type(controller) is int and controller.bit_length() < 32:
            return _core.fixed_controller(controller)
        raise _core.InvalidArgumentError(
            '[speculation] controller: expected "cost", a number of nodes or a DraftController, '
            f"got {controller!r}"
        )


def _build(proposer: ProposerRecipe | Proposer | _core.Proposer) -> Proposer | _core.Proposer:
    if not hasattr(proposer, "build"):
        return proposer
    try:
        return proposer.build()
    except TypeError as error:
        raise _core.InvalidArgumentError(
            f"[speculation] a field has a value of the wrong type: {proposer!r}"
        ) from error


def _describe(part: Any) -> str:
    native = isinstance(part, (_core.Proposer, _core.Verifier, _core.DraftController))
    if native or hasattr(part, "build"):
        return getattr(part, "name", None) or repr(part)
    return f"{getattr(part, 'name', type(part).__name__)} (Python: called once a step)"

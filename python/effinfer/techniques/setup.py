"""What techniques change of an engine and of a request; hooks in Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from effinfer import _core
from effinfer.speculation import Speculation

if TYPE_CHECKING:
    from effinfer.sampling import SamplingParams
    from effinfer.techniques.technique import Technique

TRIGGERS = ("prompt_end", "page_filled", "every", "over_budget")
_COUNTED = ("every", "over_budget")
_MARK = "_effinfer_hook"
DEFAULT_BATCH_TOKENS = 512

Method = TypeVar("Method", bound=Callable[..., None])


def hook(*, when: str, tokens: int | str = 0) -> Callable[[Method], Method]:
    """Makes a method of a Technique, run(self, event, sequence), a hook: it runs for a sequence
    behind a step in which `when` came true, and Python is not called in other steps.

    Args:
        when: "prompt_end" (its prompt was computed), "page_filled", "every" (so many tokens more
            behind the prompt), "over_budget" (it holds more slots than that).
        tokens: of the last two: a number, or the name of the field that has it.

    What it raises ends its request with finish_reason "error"; the others go on. Throws
    InvalidArgumentError for another trigger.
    """
    if when not in TRIGGERS:
        raise _core.InvalidArgumentError(
            f"[hook] when: expected one of {', '.join(TRIGGERS)}, got {when!r}"
        )
    if (when in _COUNTED) != (tokens != 0):
        expected = "a number, or a field's name" if when in _COUNTED else "none"
        raise _core.InvalidArgumentError(
            f"[hook] tokens: expected {expected} with {when!r}, got {tokens!r}"
        )

    def mark(method: Method) -> Method:
        setattr(method, _MARK, (when, tokens))
        return method

    return mark


@dataclass(frozen=True)
class Hook:
    """What an engine takes: of the technique that requests name to have it run for them ("": it
    runs for all), when it runs, and what; and the slots and positions that its requests never
    exceed between two steps, 0: there is no such bound."""

    technique: str
    triggers: dict[str, int]
    run: Callable[[_core.StepEvent, _core.SequenceState], None]
    most_slots: int = 0


def hooks_of(technique: Technique) -> Iterator[Hook]:
    """Of its methods that are marked, in the order of their names."""
    for name in sorted(dir(type(technique))):
        marked = getattr(getattr(type(technique), name), _MARK, None)
        if marked is None:
            continue
        when, tokens = marked
        count = getattr(technique, tokens) if isinstance(tokens, str) else tokens
        triggers = {when: int(count) if when in _COUNTED else 1}
        yield Hook(technique.name, triggers, getattr(technique, name))


@dataclass
class EngineSetup:
    """An engine that is about to be made, for Technique.engine()."""

    graph: _core.Graph  # with all techniques in it
    speculation: Speculation | None = None
    hooks: list[Hook | _core.StepHook | Any] = field(default_factory=list)

    def add_proposer(self, proposer: Any) -> None:
        """Beside those that the engine has."""
        given = Speculation([]) if self.speculation is None else self.speculation
        self.speculation = replace(given, proposers=[*given.proposers, proposer])

    def batch_tokens(self) -> int:
        """Of a step at most: the chunks that techniques want fit into it."""
        facts = self.graph.metadata.items()
        wanted = [
            int(value)
            for key, value in facts
            if key.startswith("technique.") and key.endswith(".chunk_tokens")
        ]
        return max([DEFAULT_BATCH_TOKENS, *wanted])


@dataclass
class RequestSetup:
    """A request that is about to be queued, for Technique.request(), which may replace `params`."""

    prompt: tuple[int, ...]
    params: SamplingParams

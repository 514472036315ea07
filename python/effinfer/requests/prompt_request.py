"""A prompt with what the engine takes for each of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from effinfer import _core
from effinfer.outputs import RequestOutput
from effinfer.requests.core_params import core_params
from effinfer.requests.state import RequestState
from effinfer.sampling import SamplingParams

if TYPE_CHECKING:
    from effinfer.requests.grammar import Constraint, GrammarCompiler
    from effinfer.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class PromptRequest:
    prompt: Sequence[int]
    params: SamplingParams
    answers: list[_core.SamplingParams]
    constraints: list[Constraint | None]  # one an answer

    def states(self, tokenizer: Tokenizer, *, keep_special: bool = False) -> list[RequestState]:
        return [
            RequestState(self.params, core, tokenizer, keep_special=keep_special)
            for core in self.answers
        ]


def prepare(
    prompt: Sequence[int],
    params: SamplingParams,
    tokenizer: Tokenizer,
    grammars: GrammarCompiler | None,
) -> PromptRequest:
    """Compiles a grammar and looks words up in the vocabulary, which may take a second. Throws
    InvalidArgumentError, UnsupportedError."""
    answers = core_params(params, tokenizer)
    constraints = [
        None if grammars is None else grammars.constraint(params, tokenizer) for _ in answers
    ]
    return PromptRequest(prompt, params, answers, constraints)


def is_slow(params: SamplingParams) -> bool:
    """Whether prepare() takes longer than an event loop may stand still."""
    return (
        params.constraint_field() is not None or bool(params.bad_words) or params.dry_multiplier > 0
    )


def one_answer(params: SamplingParams) -> SamplingParams:
    """Throws InvalidArgumentError when there shall be several."""
    if params.n != 1:
        raise _core.InvalidArgumentError(f"[generate] n: expected 1 for a stream, got {params.n}")
    return params


def gather(states: Sequence[RequestState]) -> RequestOutput:
    """The answers to one prompt as one output."""
    first, *others = (state.output(index) for index, state in enumerate(states))
    return replace(first, others=others) if others else first

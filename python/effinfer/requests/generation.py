"""Requests of one call, from admission to their outputs."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from effinfer import _core
from effinfer.outputs import RequestOutput
from effinfer.requests.loop import RequestLoop
from effinfer.requests.prompt_request import gather, one_answer, prepare
from effinfer.requests.state import RequestState
from effinfer.sampling import SamplingParams
from effinfer.speculation import SpeculationWarning

if TYPE_CHECKING:
    from effinfer.requests.grammar import GrammarCompiler
    from effinfer.text.tokenizer import Tokenizer

# How long steps run before their tokens are looked at: short enough to stream and for Ctrl-C.
_PATIENCE_SECONDS = 0.02

_log = logging.getLogger(__name__)


def _callers_level() -> int:
    """The stacklevel of who called the package: chat() is a frame more than generate()."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("effinfer."):
        level, frame = level + 1, frame.f_back
    return level


class Generation:
    """Some requests that run together. Their prompts are checked, and the requests queued, when it
    is made: InvalidArgumentError then leaves none of them behind."""

    def __init__(
        self,
        loop: RequestLoop,
        tokenizer: Tokenizer,
        requests: Sequence[tuple[Sequence[int], SamplingParams]],
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._loop = loop
        self._requests: dict[int, RequestState] = {}  # answers
        self._prompts: list[list[RequestState]] = []  # the same, by prompt
        self._running: set[int] = set()
        # Stop strings are found here, so each step has to be looked at before the next.
        has_stop = any(params.stop_strings() for _, params in requests)
        self._patience = 0.0 if has_stop else _PATIENCE_SECONDS
        try:
            for prompt, params in requests:
                prepared = prepare(prompt, params, tokenizer, grammars)
                states = prepared.states(tokenizer)
                answers = loop.add(prompt, prepared.answers, prepared.constraints)
                self._running.update(answers)
                self._requests.update(zip(answers, states, strict=True))
                self._prompts.append(states)
        except BaseException:
            self.close()
            raise

    def run(self) -> Iterator[tuple[int, str]]:
        """Runs all to the end; yields (which answer, text that became certain)."""
        indices = {request: index for index, request in enumerate(self._requests)}
        while self._running:
            for output in self._loop.wait(list(self._running), self._patience):
                if output.warning:
                    warnings.warn(output.warning, SpeculationWarning, stacklevel=_callers_level())
                state = self._requests[output.request]
                was_stopped = state.text.stopped
                piece = state.take(output)
                if output.finish_reason is not None:
                    self._finish(output.request, output.finish_reason, output.error)
                elif state.text.stopped and not was_stopped:
                    self._loop.cancel(output.request)
                if piece:
                    yield indices[output.request], piece

    def close(self) -> None:
        """Cancels what still runs."""
        self._loop.abandon(self._running)
        self._running.clear()

    def outputs(self) -> list[RequestOutput]:
        """One a prompt, in order, once run() has ended."""
        return [gather(states) for states in self._prompts]

    def _finish(self, request: int, reason: str, error: str) -> None:
        self._running.discard(request)
        metrics = self._loop.finish(request)
        self._requests[request].end(reason, error, metrics)
        _log.debug(
            "request %d: %s after %d tokens, %.3f s; prompt of %d, %d cached",
            request,
            reason,
            metrics.output_tokens,
            metrics.total_s,
            metrics.prompt_tokens,
            metrics.cached_tokens,
        )


class TextStream(Iterator[str]):
    """The text of one request as it comes."""

    def __init__(
        self,
        loop: RequestLoop,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.text = ""  # so far
        requests = [(prompt, one_answer(params or SamplingParams()))]
        self._generation = Generation(loop, tokenizer, requests, grammars)
        self._pieces = self._generation.run()

    def __next__(self) -> str:
        try:
            _, piece = next(self._pieces)
        except StopIteration:
            output = self.output()
            if output.finish_reason == "error":
                raise _core.Error(output.error) from None
            raise
        self.text += piece
        return piece

    def output(self) -> RequestOutput:
        """Everything about the request, once the iteration has ended."""
        return self._generation.outputs()[0]

    def close(self) -> None:
        """Cancels the request if it still runs."""
        self._generation.close()

    def __del__(self) -> None:
        if hasattr(self, "_generation"):
            self.close()

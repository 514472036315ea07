"""Runs the engine for callers on any number of threads.

There is no thread of its own: whoever waits for tokens and finds nobody stepping runs the next step
for all, and hands out what it gave. So requests of several threads share steps, and Ctrl-C reaches
the caller between two of them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import starmap
from typing import TYPE_CHECKING

from effinfer import _core
from effinfer.outputs import RequestMetrics
from effinfer.requests.state import take_metrics

if TYPE_CHECKING:
    from effinfer.requests.grammar import Constraint

_MAX_STEPS = 1 << 20


class RequestLoop:
    def __init__(self, engine: _core.Engine) -> None:
        self._engine: _core.Engine | None = engine
        self._changed = threading.Condition()
        self._stepping = False
        self._closed = False
        self._inbox: dict[int, list[_core.StepOutput]] = {}
        self._leaving: set[int] = set()  # abandoned, and their last output has not come

    @property
    def engine(self) -> _core.Engine:
        """Throws InvalidArgumentError once the loop is closed and nobody's request is left."""
        if self._engine is None:
            raise _core.InvalidArgumentError("[LLM] closed: it was closed before this call")
        return self._engine

    def add(
        self,
        prompt: Sequence[int],
        params: Sequence[_core.SamplingParams],
        constraints: Sequence[Constraint | None] = (),
    ) -> list[int]:
        """Queues the answers to a prompt; throws what Engine.add_answers() throws."""
        with self._changed:
            if self._closed:
                raise _core.InvalidArgumentError("[LLM] closed: it was closed before this call")
            requests = self.engine.add_answers(prompt, params, constraints)
            self._inbox.update((request, []) for request in requests)
            return requests

    def cancel(self, request: int) -> None:
        """Asks for the end of a request: its last output says "cancelled"."""
        self.engine.cancel(request)

    def abandon(self, requests: Iterable[int]) -> None:
        """Cancels requests whose outputs nobody will wait for, and gives their pages back."""
        with self._changed:
            for request in requests:
                pending = self._inbox.pop(request, None)
                if pending is None:
                    continue
                self.engine.cancel(request)
                if any(output.finish_reason is not None for output in pending):
                    self.engine.forget(request)
                else:
                    self._leaving.add(request)
            self._release_if_closed()
        self._settle()

    def wait(self, requests: Sequence[int], max_seconds: float) -> list[_core.StepOutput]:
        """Outputs of these requests, at least one; runs steps until there is one, and goes on for
        up to `max_seconds` while none ends."""
        while True:
            with self._changed:
                while True:
                    outputs = self._take(requests)
                    if outputs:
                        return outputs
                    if not self._stepping:
                        self._stepping = True
                        break
                    self._changed.wait()
            self._step(max_seconds)
            self._settle()

    def finish(self, request: int) -> RequestMetrics:
        """Metrics of a request whose last output has come; the engine forgets it."""
        with self._changed:
            metrics = take_metrics(self.engine, request)
            self._inbox.pop(request, None)
            self._release_if_closed()
            return metrics

    def close(self) -> None:
        """Cancels all requests, whose owners find "cancelled", and drops the engine when the last
        of them has."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for request in self._inbox:
                self.engine.cancel(request)
        while True:
            with self._changed:
                has_requests = bool(self._inbox or self._leaving)
                if not has_requests or not self.engine.has_work():
                    self._release_if_closed()
                    return
                if self._stepping:
                    self._changed.wait()
                    continue
                self._stepping = True
            self._step(0.0)

    def _settle(self) -> None:
        """A cancelled request ends in a step: this is one, unless somebody is stepping, who then
        comes by here."""
        with self._changed:
            if self._stepping or not self._leaving:
                return
            self._stepping = True
        self._step(0.0)

    def _step(self, max_seconds: float) -> None:
        results: list[list[_core.StepOutput]] = []
        try:
            # extend() stores the result before the interpreter looks for signals: a Ctrl-C during
            # the step cannot lose tokens of other callers.
            results.extend(starmap(self.engine.step_many, [(_MAX_STEPS, max_seconds)]))
        finally:
            with self._changed:
                for output in results[0] if results else []:
                    if output.request in self._inbox:
                        self._inbox[output.request].append(output)
                    elif output.finish_reason is not None:
                        self._leaving.discard(output.request)
                        self.engine.forget(output.request)
                self._stepping = False
                self._changed.notify_all()

    def _take(self, requests: Sequence[int]) -> list[_core.StepOutput]:
        outputs: list[_core.StepOutput] = []
        for request in requests:
            pending = self._inbox.get(request)
            if pending:
                outputs += pending
                pending.clear()
        return outputs

    def _release_if_closed(self) -> None:
        if self._closed and not self._inbox and not self._leaving and not self._stepping:
            self._engine = None

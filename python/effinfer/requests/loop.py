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
from effinfer.outputs import RequestMetrics, SpeculationMetrics

if TYPE_CHECKING:
    from effinfer.requests.grammar import Constraint

_MAX_STEPS = 1 << 20


class RequestLoop:
    def __init__(self, engine: _core.Engine) -> None:
        self._engine = engine
        self._changed = threading.Condition()
        self._stepping = False
        self._inbox: dict[int, list[_core.StepOutput]] = {}

    def add(
        self,
        prompt: Sequence[int],
        params: _core.SamplingParams,
        constraint: Constraint | None = None,
    ) -> int:
        """Queues a request; throws what Engine.add() throws."""
        with self._changed:
            request = self._engine.add(prompt, params, constraint)
            self._inbox[request] = []
            return request

    def cancel(self, request: int) -> None:
        """Asks for the end of a request: its last output says "cancelled"."""
        self._engine.cancel(request)

    def abandon(self, requests: Iterable[int]) -> None:
        """Cancels requests whose outputs nobody will wait for."""
        with self._changed:
            for request in requests:
                self._engine.cancel(request)
                pending = self._inbox.pop(request, [])
                if any(output.finish_reason is not None for output in pending):
                    self._engine.forget(request)

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

    def finish(self, request: int) -> RequestMetrics:
        """Metrics of a request whose last output has come; the engine forgets it."""
        with self._changed:
            self._inbox.pop(request, None)
            counts = self._engine.metrics(request)
            drafts = SpeculationMetrics(**counts.pop("speculation"))
            metrics = RequestMetrics(**counts, speculation=drafts)
            self._engine.forget(request)
            return metrics

    def _step(self, max_seconds: float) -> None:
        results: list[list[_core.StepOutput]] = []
        try:
            # extend() stores the result before the interpreter looks for signals: a Ctrl-C during
            # the step cannot lose tokens of other callers.
            results.extend(starmap(self._engine.step_many, [(_MAX_STEPS, max_seconds)]))
        finally:
            with self._changed:
                for output in results[0] if results else []:
                    if output.request in self._inbox:
                        self._inbox[output.request].append(output)
                    elif output.finish_reason is not None:
                        self._engine.forget(output.request)
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

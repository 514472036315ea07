"""An engine whose requests say what scripts have them say."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import Any

from effinfer import _core

BROKEN = -1
STOP = -2


class ScriptedEngine:
    """Gives request n the tokens of scripts[prompt[0]], one a step. BROKEN fails the request, STOP
    is the token that ends its text."""

    def __init__(self, scripts: dict[int, list[int]], steps_per_call: int = 1) -> None:
        self.scripts = scripts
        self.steps_per_call = steps_per_call
        self.running: dict[int, list[int]] = {}
        self.cancelled: set[int] = set()
        self.known: set[int] = set()
        self.interrupted_step = 0
        self.steps = 0
        self._ids = itertools.count(100)
        self._busy = threading.Lock()

    def add_answers(
        self,
        prompt: list[int],
        answers: list[_core.SamplingParams],
        constraints: list[object] | None = None,
    ) -> list[int]:
        if prompt[0] not in self.scripts:
            raise _core.InvalidArgumentError("[engine] prompt")
        requests = [next(self._ids) for _ in answers]
        for request, params in zip(requests, answers, strict=True):
            self.running[request] = list(self.scripts[prompt[0]])[: params.max_tokens]
        self.known.update(requests)
        return requests

    def cancel(self, request: int) -> None:
        self.cancelled.add(request)

    def has_work(self) -> bool:
        return bool(self.running)

    def step_many(self, max_steps: int, max_seconds: float) -> list[Any]:
        self.steps += 1
        if self.steps == self.interrupted_step:
            raise KeyboardInterrupt
        assert self._busy.acquire(blocking=False), "two threads step at once"
        outputs: dict[int, Any] = {}
        for _ in range(self.steps_per_call if max_seconds > 0 else 1):
            self._step(outputs)
        self._busy.release()
        return list(outputs.values())

    def _step(self, outputs: dict[int, Any]) -> None:
        for request, tokens in list(self.running.items()):
            output = outputs.setdefault(
                request,
                SimpleNamespace(
                    request=request,
                    tokens=[],
                    prompt=[],
                    finish_reason=None,
                    stop_token=False,
                    error="",
                    warning="",
                ),
            )
            if request in self.cancelled:
                output.finish_reason = "cancelled"
            elif tokens[0] == BROKEN:
                output.finish_reason, output.error = "error", "[engine] broke"
            elif tokens[0] == STOP:
                output.tokens.append(SimpleNamespace(token=0, logprob=-1.0, top=[]))
                output.finish_reason, output.stop_token = "stop", True
            else:
                output.tokens.append(SimpleNamespace(token=tokens.pop(0), logprob=-1.0, top=[]))
                output.finish_reason = None if tokens else "length"
            if output.finish_reason:
                del self.running[request]

    def metrics(self, request: int) -> dict[str, Any]:
        assert request in self.known
        counts = dict.fromkeys(("prompt_tokens", "cached_tokens", "output_tokens"), 1)
        return {
            **counts,
            "preemptions": 0,
            "time_to_first_token_s": 0.1,
            "total_s": 0.2,
            "speculation": {},
        }

    def forget(self, request: int) -> None:
        self.known.remove(request)

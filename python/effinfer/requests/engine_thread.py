"""A thread that runs the engine for event loops.

The thread steps while there is work and sleeps otherwise. What a call of the engine gave goes to
each event loop in one call_soon_threadsafe, whatever the number of its requests; while a loop is
busy, what follows waits in its mailbox and is delivered together. Texts are made in the loops.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from effinfer import _core
from effinfer.outputs import RequestMetrics
from effinfer.requests.state import take_metrics

if TYPE_CHECKING:
    from effinfer.requests.grammar import Constraint

_MAX_STEPS = 1 << 20
# How long steps run before their tokens are looked at, once every request has its first: each look
# costs a wake-up of the event loops, and nobody sees text appear in steps of less. Of many streams
# each look costs more, and a step takes as long as some looks of one: so much more a request.
_PATIENCE_SECONDS = 0.02
_PATIENCE_OF_EACH = 0.001
_MOST_PATIENCE = 0.06


class QueueFullError(_core.Error):
    """As many requests wait as may; try again later."""


class Receiver(Protocol):
    """Takes the outputs of a request, in its event loop."""

    def receive(self, output: _core.StepOutput, metrics: RequestMetrics | None) -> None:
        """`metrics` come with the last output."""

    def fail(self, error: str) -> None:
        """The engine stopped; nothing will follow."""


@dataclass(eq=False)
class _Mailbox:
    """What waits for one event loop: calls to make there."""

    loop: asyncio.AbstractEventLoop
    lock: threading.Lock = field(default_factory=threading.Lock)
    waiting: list[tuple[Any, ...]] = field(default_factory=list)  # function, arguments
    open_requests: int = 0  # guarded by the thread's lock

    def put(self, calls: list[tuple[Any, ...]]) -> bool:
        """False when the loop is closed."""
        with self.lock:
            is_scheduled = bool(self.waiting)
            self.waiting += calls
        try:
            if not is_scheduled:
                self.loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            return False
        return True

    def _deliver(self) -> None:
        with self.lock:
            calls, self.waiting = self.waiting, []
        for call, *arguments in calls:
            call(*arguments)


class EngineThread:
    def __init__(self, engine: _core.Engine, max_requests: int) -> None:
        """At most `max_requests` run and wait at once."""
        self._engine: _core.Engine | None = engine
        self._max_requests = max_requests
        self._changed = threading.Condition()
        self._requests: dict[int, tuple[_Mailbox, Receiver]] = {}
        self._mailboxes: dict[asyncio.AbstractEventLoop, _Mailbox] = {}
        self._without_token: set[int] = set()
        self._closed = False
        self.failure = ""  # why the engine stopped by itself
        self._thread = threading.Thread(
            target=self._run, args=(engine,), name="effinfer-engine", daemon=True
        )
        self._thread.start()

    def add(
        self,
        prompt: Sequence[int],
        params: Sequence[_core.SamplingParams],
        constraints: Sequence[Constraint | None],
        receivers: Sequence[Receiver],
    ) -> list[int]:
        """Queues the answers to a prompt, requests of the running event loop. Throws
        QueueFullError, and what Engine.add_answers() throws."""
        loop = asyncio.get_running_loop()
        with self._changed:
            if self.failure:
                raise _core.Error(f"[AsyncLLM] the engine stopped: {self.failure}")
            if self._closed or self._engine is None:
                raise _core.InvalidArgumentError(
                    "[AsyncLLM] closed: it was closed before this call"
                )
            if len(self._requests) + len(params) > self._max_requests:
                raise QueueFullError(
                    f"[AsyncLLM] queue: expected at most {self._max_requests} requests that run "
                    "or wait (max_sequences and max_waiting)"
                )
            requests = self._engine.add_answers(prompt, params, constraints)
            mailbox = self._mailboxes.setdefault(loop, _Mailbox(loop))
            mailbox.open_requests += len(requests)
            for request, receiver in zip(requests, receivers, strict=True):
                self._requests[request] = (mailbox, receiver)
                self._without_token.add(request)
            self._changed.notify()
            return requests

    def cancel(self, request: int) -> None:
        """Asks for the end of a request: its last output says "cancelled"."""
        with self._changed:
            self._cancel(request)

    def abandon(self, request: int) -> None:
        """Cancels a request whose outputs nobody will take."""
        with self._changed:
            self._remove(request)
            self._cancel(request)

    def close(self) -> None:
        """Cancels all requests, ends the thread and lets go of the engine."""
        with self._changed:
            self._closed = True
            for request in self._requests:
                self._cancel(request)
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._engine = None

    def _cancel(self, request: int) -> None:
        if self._engine is not None:
            self._engine.cancel(request)

    def _run(self, engine: _core.Engine) -> None:
        try:
            while self._sleep_until_work(engine):
                self._hand_out(engine, engine.step_many(_MAX_STEPS, self._patience()))
        except Exception as error:  # of the whole engine: those of a request are in its output
            self._fail(str(error))

    def _patience(self) -> float:
        if self._without_token:
            return 0.0
        return min(_PATIENCE_SECONDS + _PATIENCE_OF_EACH * len(self._requests), _MOST_PATIENCE)

    def _sleep_until_work(self, engine: _core.Engine) -> bool:
        """False when the thread shall end."""
        with self._changed:
            while not engine.has_work():
                if self._closed:
                    return False
                self._changed.wait()
        return True

    def _hand_out(self, engine: _core.Engine, outputs: list[_core.StepOutput]) -> None:
        letters: dict[_Mailbox, list[tuple[Any, ...]]] = {}
        with self._changed:
            for output in outputs:
                self._without_token.discard(output.request)
                metrics = None
                if output.finish_reason is not None:
                    metrics = take_metrics(engine, output.request)
                known = self._requests.get(output.request)
                if known is None:
                    continue
                mailbox, receiver = known
                letters.setdefault(mailbox, []).append((receiver.receive, output, metrics))
                if metrics is not None:
                    self._remove(output.request)
        for mailbox, calls in letters.items():
            if not mailbox.put(calls):
                self._drop(mailbox)

    def _remove(self, request: int) -> None:
        known = self._requests.pop(request, None)
        self._without_token.discard(request)
        if known is None:
            return
        mailbox = known[0]
        mailbox.open_requests -= 1
        if mailbox.open_requests == 0:
            self._mailboxes.pop(mailbox.loop, None)

    def _drop(self, mailbox: _Mailbox) -> None:
        with self._changed:
            gone = [request for request, (box, _) in self._requests.items() if box is mailbox]
            for request in gone:
                self._remove(request)
                self._cancel(request)

    def _fail(self, error: str) -> None:
        with self._changed:
            self.failure = error or "unknown error"
            requests, self._requests = list(self._requests.values()), {}
        for mailbox, receiver in requests:
            mailbox.put([(receiver.fail, self.failure)])

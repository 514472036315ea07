"""Requests of one call from an event loop, from admission to their outputs."""

from __future__ import annotations

import asyncio
import warnings
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from effinfer import _core
from effinfer.outputs import RequestMetrics, RequestOutput
from effinfer.requests.engine_thread import EngineThread
from effinfer.requests.prompt_request import PromptRequest, gather
from effinfer.requests.state import RequestState
from effinfer.speculation import SpeculationWarning

if TYPE_CHECKING:
    from effinfer.text.tokenizer import Tokenizer

MAX_WAITING_PIECES = 256

_NO_METRICS = RequestMetrics(
    prompt_tokens=0,
    cached_tokens=0,
    output_tokens=0,
    preemptions=0,
    time_to_first_token_s=0.0,
    total_s=0.0,
)


class AsyncRequest:
    """One answer, in its event loop. Its pieces of text wait until they are read."""

    def __init__(
        self,
        thread: EngineThread,
        news: asyncio.Event,
        state: RequestState,
        is_streamed: bool,
    ) -> None:
        """`id` is to be set before the event loop goes on."""
        self.id = -1
        self.state = state
        self.ended = False
        self._thread = thread
        self._news = news
        self._is_streamed = is_streamed
        self._pieces: deque[str] = deque()
        self._is_cancelled = False

    def receive(self, output: _core.StepOutput, metrics: RequestMetrics | None) -> None:
        if self.ended:  # closed while this was on its way
            return
        try:
            self._take(output, metrics)
        except Exception as error:  # of this request alone: others share the delivery
            self._give_up(f"[AsyncLLM] {type(error).__name__}: {error}")
        self._news.set()

    def fail(self, error: str) -> None:
        if not self.ended:
            self._end("error", error, None)
            self._news.set()

    def pop_piece(self) -> str | None:
        return self._pieces.popleft() if self._pieces else None

    def pop_text(self) -> str:
        """All that waits."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    @property
    def failed(self) -> bool:
        """Whether it ended before the model or its parameters said so."""
        return self.ended and self.state.finish_reason in ("error", "cancelled")

    def has_news(self) -> bool:
        return bool(self._pieces) or self.ended

    def close(self) -> None:
        if not self.ended:
            self._thread.abandon(self.id)
            self._end("cancelled", "", None)
            self._pieces.clear()
            self._news.set()

    def _take(self, output: _core.StepOutput, metrics: RequestMetrics | None) -> None:
        if output.warning:
            warnings.warn(output.warning, SpeculationWarning, stacklevel=2)
        piece = self.state.take(output)
        if piece and self._is_streamed:
            if len(self._pieces) >= MAX_WAITING_PIECES:
                self._give_up(f"[AsyncLLM] {MAX_WAITING_PIECES} pieces wait to be read")
                return
            self._pieces.append(piece)
        if metrics is not None:
            self._end(output.finish_reason or "error", output.error, metrics)
        elif self.state.text.stopped and not self._is_cancelled:
            self._is_cancelled = True
            self._thread.cancel(self.id)

    def _give_up(self, error: str) -> None:
        self._thread.abandon(self.id)
        self._end("error", error, None)

    def _end(self, reason: str, error: str, metrics: RequestMetrics | None) -> None:
        self.ended = True
        self.state.end(reason, error, metrics or _NO_METRICS)


class AsyncGeneration:
    """Some prompts that run together. They are checked, and the requests queued, when it
    is made: an error then leaves none of them behind."""

    def __init__(
        self,
        thread: EngineThread,
        tokenizer: Tokenizer,
        prompts: Sequence[PromptRequest],
        *,
        is_streamed: bool,
        keep_special: bool = False,
    ) -> None:
        self.requests: list[AsyncRequest] = []  # answers
        self._prompts: list[list[AsyncRequest]] = []  # the same, by prompt
        self._news = asyncio.Event()
        try:
            for prompt in prompts:
                answers = [
                    AsyncRequest(thread, self._news, state, is_streamed)
                    for state in prompt.states(tokenizer, keep_special=keep_special)
                ]
                ids = thread.add(prompt.prompt, prompt.answers, prompt.constraints, answers)
                for answer, request in zip(answers, ids, strict=True):
                    answer.id = request
                self.requests += answers
                self._prompts.append(answers)
        except BaseException:
            self.close()
            raise

    async def wait(self) -> None:
        """Until one of the requests has something new."""
        await self._news.wait()
        self._news.clear()

    async def wait_for_all(self) -> None:
        """Cancels the requests when it is cancelled."""
        try:
            while not all(request.ended for request in self.requests):
                await self.wait()
        finally:
            self.close()

    def close(self) -> None:
        """Cancels what still runs."""
        for request in self.requests:
            request.close()

    def outputs(self) -> list[RequestOutput]:
        """One a prompt, in order, once all answers have ended."""
        return [gather([answer.state for answer in answers]) for answers in self._prompts]


class AsyncStream:
    """The text of one request as it comes: an asynchronous iterator of str. A cancelled task
    cancels the request, and so does dropping the stream."""

    def __init__(self, generation: AsyncGeneration, model: object) -> None:
        """`model` lives as long as the stream does."""
        self._model = model
        self._generation = generation
        self._request = generation.requests[0]

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> str:
        """Throws Error when the request failed."""
        await self._wait()
        piece = self._request.pop_piece()
        if piece is None:
            self._raise_error()
            raise StopAsyncIteration
        return piece

    async def read(self) -> str:
        """All the text that waits, once there is some; "" at the end. Throws as iterating does."""
        await self._wait()
        text = self._request.pop_text()
        if not text:
            self._raise_error()
        return text

    @property
    def text(self) -> str:
        """What the model has said so far, whether it was read or not."""
        return self._request.state.text.text

    @property
    def ended(self) -> bool:
        """Whether the request has; pieces may still wait."""
        return self._request.ended

    def output(self) -> RequestOutput:
        """Everything about the request, once it has ended."""
        return self._request.state.output()

    def close(self) -> None:
        """Cancels the request if it still runs. From the stream's event loop."""
        self._generation.close()

    async def aclose(self) -> None:
        self.close()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_generation"):
            self._generation.close()

    async def _wait(self) -> None:
        try:
            while not self._request.has_news():
                await self._generation.wait()
        except asyncio.CancelledError:
            self.close()
            raise

    def _raise_error(self) -> None:
        state = self._request.state
        if state.finish_reason == "error":
            raise _core.Error(state.error)

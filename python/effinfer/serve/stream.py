"""Answers as server-sent events.

One writer a request: it wakes when the engine's steps gave something to any of its choices, takes
all that waits, and sends it in one piece. The part of an event that stays the same is written once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from effinfer.requests.async_generation import AsyncRequest
from effinfer.serve.answer import Answer
from effinfer.serve.connection import closed_on_disconnect
from effinfer.serve.errors import ApiError, engine_error

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would wait for more
]


def data_event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


class Events(Protocol):
    """The events of a route, as they are sent."""

    def begin(self) -> Iterator[str]:
        """Before the first token."""

    def grow(self, index: int, choice: AsyncRequest, text: str) -> Iterator[str]:
        """What a choice has got; with its last text it has ended. For one that failed, the text
        alone."""

    def end(self) -> Iterator[str]:
        """After the last choice."""

    def fail(self, error: ApiError) -> Iterator[str]:
        """In place of an end."""


class EventStream(Response):
    """Streams an answer, and closes it with the connection."""

    media_type = None

    def __init__(self, answer: Answer, events: Events) -> None:
        super().__init__()
        self._answer = answer
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answer
        try:
            async with closed_on_disconnect(receive, answer.generation):
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                await self._send(send, self._events.begin())
                await self._send_choices(send)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            answer.generation.close()
            answer.close()

    async def _send_choices(self, send: Send) -> None:
        running = dict(enumerate(self._answer.choices))
        while running:
            await self._answer.generation.wait()
            data: list[str] = []
            for index, choice in list(running.items()):
                if not choice.has_news():
                    continue
                text = choice.pop_text()
                data += self._events.grow(index, choice, text)
                if choice.failed:
                    # Clients do not cancel: the server does, or the connection is gone.
                    why = choice.state.error or "the server is shutting down"
                    data += self._events.fail(engine_error(why))
                    await self._send(send, iter(data))
                    return
                if choice.ended:
                    del running[index]
            if not running:
                data += self._events.end()
            await self._send(send, iter(data))

    async def _send(self, send: Send, data: Iterator[str]) -> None:
        body = "".join(data)
        if body:
            await send({"type": "http.response.body", "body": body.encode(), "more_body": True})

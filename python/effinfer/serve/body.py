"""The body of a request: read within limits, parsed, checked against a schema."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any, TypeVar

import pydantic
import pydantic_core
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope

from effinfer.serve.errors import ApiError

MAX_BYTES = 8 << 20
# What is read and thrown away of a refused body: before the refusal, whose connection then goes on,
# and behind it, where there is more.
_MOST_BEFORE = 8 * MAX_BYTES
_MOST_BEHIND = 64 * MAX_BYTES
# A body that takes longer comes from a client that has stopped sending.
_SECONDS = 30.0

# To name one, all are made into text.
_MOST_PROBLEMS = 1000

Schema = TypeVar("Schema", bound=pydantic.BaseModel)


async def read_body(request: Request, schema: type[Schema]) -> Schema:
    """Throws ApiError; 413 for a body that is too long, 408 for one that does not come."""
    # A page of another site can send other types without asking.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(400, "Content-Type: expected application/json", code="invalid_content_type")
    try:
        raw = await asyncio.wait_for(_read(request), _SECONDS)
    except asyncio.TimeoutError:
        raise ApiError(408, "the body did not come in time", code="body_timeout") from None
    return parse(raw, schema)


def parse(raw: bytes, schema: type[Schema]) -> Schema:
    try:
        data = pydantic_core.from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError(400, "the body: expected a JSON object", code="invalid_type")
    try:
        return schema.model_validate(data)
    except pydantic.ValidationError as error:
        raise explain(error, data) from None


async def _read(request: Request) -> bytes:
    too_long = ApiError(413, f"the body: expected at most {MAX_BYTES} bytes", code="body_too_long")
    try:
        if int(request.headers.get("content-length", 0)) > MAX_BYTES:
            raise too_long
    except ValueError:
        raise ApiError(400, "Content-Length: expected a number", code="invalid_header") from None
    chunks = bytearray()
    try:
        async for chunk in request.stream():
            chunks += chunk
            if len(chunks) > MAX_BYTES:
                raise too_long
    except ClientDisconnect:
        raise ApiError(400, "the body is not complete", code="invalid_body") from None
    return bytes(chunks)


class BodyEnd:
    """Knows whether the body of a request was read to its end. A client that is still sending when
    its connection is closed may lose the answer: what a refusal has left of a body is read and
    thrown away, before the refusal is sent or before the connection is closed behind it."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        headers = Headers(scope=scope)
        self.reached = "content-length" not in headers and "transfer-encoding" not in headers
        self._receive = receive
        self._length = headers.get("content-length", "0")
        self._asks_first = "expect" in headers  # and sends nothing until somebody reads

    async def receive(self) -> Message:
        message = await self._receive()
        self.reached |= not message.get("more_body", False)
        return message

    async def discard(self) -> None:
        """Up to the end, unless that is far away or does not come."""
        is_long = self._length.isdecimal() and int(self._length[:20]) > _MOST_BEFORE
        if not is_long:
            await self._discard(_MOST_BEFORE)

    async def linger(self) -> None:
        """Behind the refusal: until a client that sends all before it reads has done so, within
        limits; one that reads meanwhile stops."""
        await self._discard(_MOST_BEHIND)

    async def _discard(self, most: int) -> None:
        if not self.reached and not self._asks_first:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._read_on(most), _SECONDS)

    async def _read_on(self, most: int) -> None:
        size = 0
        while not self.reached and size <= most:
            size += len((await self.receive()).get("body", b""))


def explain(error: pydantic.ValidationError, data: dict[str, Any]) -> ApiError:
    """The first problem, where it is."""
    if error.error_count() > _MOST_PROBLEMS:
        return ApiError(
            400, f"the body: {error.error_count()} fields are wrong", code="invalid_type"
        )
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = _path(problem["loc"], data)
    if problem["type"] == "extra_forbidden":
        return ApiError(400, f"{param}: unknown option", param=param, code="unknown_parameter")
    if problem["type"] == "missing":
        param = ".".join(filter(None, [param, str(problem["loc"][-1])]))
        return ApiError(400, f"{param}: missing", param=param, code="missing_required_parameter")
    is_type = problem["type"].endswith(("_type", "_parsing"))
    code = "invalid_type" if is_type else "invalid_value"
    return ApiError(400, f"{param}: {problem['msg']}", param=param, code=code)


def _path(location: Sequence[int | str], data: Any) -> str:
    """`location` as far as the body has it: behind that are names of alternatives."""
    path = ""
    for key in location:
        if isinstance(data, dict) and key in data:
            path += f".{key}" if path else str(key)
            data = data[key]
        elif isinstance(data, list) and isinstance(key, int) and key < len(data):
            path += f"[{key}]"
            data = data[key]
        else:
            break
    return path

"""What a client gets in place of an answer: OpenAI's error object."""

from __future__ import annotations

import json
import re
from typing import Any

from starlette.responses import Response

from effinfer import _core
from effinfer.requests.engine_thread import QueueFullError

# "[chat] messages[0].content: expected ..." names the argument that is wrong.
_ARGUMENT = re.compile(r"\[\w+\] ([a-z_]+[\w\[\].]*):? ")

# Fields of SamplingParams that have another name in a body.
_FIELDS: dict[str | None, str] = {
    "regex": "guided_regex",
    "choices": "guided_choice",
    "grammar": "guided_grammar",
}

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """Ends a request with a status and an error object."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def to_dict(self) -> dict[str, Any]:
        other = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, other),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self, *, closes: bool = False) -> Response:
        """closes: the connection is not used again."""
        headers = {}
        if self.status in (429, 503):
            headers["Retry-After"] = "1"
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if closes:
            headers["Connection"] = "close"
        return Response(
            json.dumps(self.to_dict(), ensure_ascii=False),
            self.status,
            headers,
            "application/json",
        )


def unsupported(param: str, why: str) -> ApiError:
    return ApiError(400, f"{param}: {why}", param=param, code="unsupported_parameter")


def from_engine(error: _core.Error, schema_field: str = "response_format") -> ApiError:
    """The answer to an error of the library. schema_field: what a JSON schema came from."""
    message = str(error)
    if isinstance(error, QueueFullError):
        return ApiError(429, "too many requests wait; try again later", code="queue_full")
    if isinstance(error, _core.InvalidArgumentError):
        named = _ARGUMENT.match(message)
        param = named[1] if named else None
        field = schema_field if param == "json_schema" else _FIELDS.get(param, param)
        return ApiError(400, message, param=field, code="invalid_value")
    if isinstance(error, _core.UnsupportedError):
        return ApiError(400, message, code="unsupported_parameter")
    return ApiError(500, message, code="engine_error")


def engine_error(error: str) -> ApiError:
    """Of a request that failed in the engine."""
    return ApiError(500, error, code="engine_error")

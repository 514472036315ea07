"""What every request passes: the key, and errors as OpenAI's objects."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from effinfer.serve.body import BodyEnd
from effinfer.serve.errors import ApiError
from effinfer.serve.served import Served, logger

# They tell nothing of anybody's texts.
_OPEN = {"/", "/chat.css", "/chat.js", "/health", "/version"}


class Gate:
    def __init__(self, app: ASGIApp, served: Served) -> None:
        self._app = app
        self._served = served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        served = self._served
        started = False
        body = BodyEnd(scope, receive)
        refusal: ApiError

        async def send_on(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        served.open_requests += 1
        try:
            self._check(scope)
            await self._app(scope, body.receive, send_on)
            return
        except ApiError as error:
            refusal = error
        except Exception:
            logger.exception("a request failed")
            if started:
                raise
            refusal = ApiError(500, "internal error")
        finally:
            served.open_requests -= 1
        await self._refuse(refusal, scope, body, send)

    def _check(self, scope: Scope) -> None:
        path = scope["path"]
        if path in _OPEN:
            return
        key = self._served.api_key
        if key is not None:
            given = Headers(scope=scope).get("authorization", "")
            kind, _, token = given.partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(token.encode(), key.encode()):
                raise ApiError(401, "Authorization: expected the API key", code="invalid_api_key")
        if self._served.is_draining and scope["method"] == "POST":
            raise ApiError(503, "the server is shutting down", code="shutting_down")

    async def _refuse(self, error: ApiError, scope: Scope, body: BodyEnd, send: Send) -> None:
        is_patient = error.status != 408  # that has waited long enough
        if is_patient:
            await body.discard()
        # Not the path: a client writes it, line ends included.
        route = getattr(scope.get("route"), "path", "other")
        self._served.metrics.refused(route, error.status)
        logger.info("%s %d %s", route, error.status, " ".join(error.message.split()))
        response = error.response(closes=not body.reached)

        async def send_open(message: Message) -> None:
            is_body = message["type"] == "http.response.body"
            await send({**message, "more_body": True} if is_body else message)

        await response(scope, body.receive, send_open)
        if is_patient:
            await body.linger()
        await send({"type": "http.response.body", "body": b""})

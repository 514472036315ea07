"""The routes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from effinfer import __version__
from effinfer.serve import about, chat, completions, page, responses
from effinfer.serve.errors import ApiError
from effinfer.serve.gate import Gate
from effinfer.serve.served import Served

Handler = Callable[[Request, Served], Awaitable[Response]]

_ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", chat.ROUTE, chat.chat),
    ("POST", completions.ROUTE, completions.completions),
    ("POST", responses.ROUTE, responses.responses),
    ("POST", "/v1/embeddings", about.embeddings),
    ("POST", "/tokenize", about.tokenize),
    ("POST", "/detokenize", about.detokenize),
    ("GET", "/v1/models", about.models),
    ("GET", "/v1/models/{name:path}", about.model),
    ("GET", "/", page.page),
    ("GET", "/chat.css", page.style),
    ("GET", "/chat.js", page.script),
    ("GET", "/health", about.health),
    ("GET", "/version", about.version),
    ("GET", "/metrics", about.metrics),
)


def make_app(served: Served) -> FastAPI:
    # Its pages about the API load scripts from elsewhere, and know nothing of the bodies.
    app = FastAPI(version=__version__, openapi_url=None)
    for method, path, handler in _ROUTES:
        methods = ["GET", "HEAD"] if method == "GET" else [method]
        app.add_api_route(
            path, _endpoint(handler, served), methods=methods, name=path, include_in_schema=False
        )

    async def unknown(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        # 404 and 405 of the router. The gate answers.
        raise ApiError(error.status_code, str(error.detail)) from None

    app.add_exception_handler(HTTPException, unknown)
    app.add_middleware(Gate, served=served)
    return app


def _endpoint(handler: Handler, served: Served) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(request, served)

    return endpoint

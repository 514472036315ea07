"""GET /: a page to talk with the model. It loads nothing from anywhere else."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from effinfer.serve.served import Served

_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_TYPES = {"chat.html": "text/html", "chat.css": "text/css", "chat.js": "text/javascript"}


async def page(_: Request, __: Served) -> Response:
    return _file("chat.html")


async def style(_: Request, __: Served) -> Response:
    return _file("chat.css")


async def script(_: Request, __: Served) -> Response:
    return _file("chat.js")


def _file(name: str) -> Response:
    return Response(_read(name), headers=_HEADERS, media_type=_TYPES[name])


@cache
def _read(name: str) -> bytes:
    return files("effinfer.serve").joinpath(f"static/{name}").read_bytes()

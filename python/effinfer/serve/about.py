"""What the server is: its models, whether it answers, tokens of texts, metrics."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from effinfer import __version__, _core
from effinfer.serve.body import read_body
from effinfer.serve.errors import ApiError, from_engine
from effinfer.serve.sampling import check_length
from effinfer.serve.schemas import DetokenizeBody, TokenizeBody
from effinfer.serve.served import Served


async def health(_: Request, served: Served) -> Response:
    """503 until the model answers, while requests end before the server does, and for ever when the
    engine has stopped."""
    if served.is_draining:
        raise ApiError(503, "the server is shutting down", code="shutting_down")
    served.model()
    return JSONResponse({"status": "ok"})


async def version(_: Request, __: Served) -> Response:
    return JSONResponse({"version": __version__})


async def models(_: Request, served: Served) -> Response:
    data = [_model(name, served) for name in served.names]
    return JSONResponse({"object": "list", "data": data})


async def model(request: Request, served: Served) -> Response:
    name = request.path_params["name"]
    if name not in served.names:
        raise ApiError(404, f"no model {name[:100]!r}", param="model", code="model_not_found")
    return JSONResponse(_model(name, served))


async def metrics(_: Request, served: Served) -> Response:
    return Response(served.metrics.text(), media_type="text/plain; version=0.0.4")


async def tokenize(request: Request, served: Served) -> Response:
    body = await read_body(request, TokenizeBody)
    llm = served.model(body.model)
    given = [value for value in (body.content, body.prompt, body.messages) if value is not None]
    if len(given) != 1:
        raise ApiError(400, "expected one of content, prompt, messages", code="invalid_value")
    check_length(given, llm, "content")
    try:
        if body.messages is not None:
            ids = await llm.chat_tokens(body.messages)
        else:
            ids = await llm.tokenize(
                str(given[0]),
                add_special=body.add_special is not False,
                parse_special=body.parse_special is not False,
            )
    except _core.Error as error:
        raise from_engine(error) from None
    return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": llm.engine.max_seq_len})


async def detokenize(request: Request, served: Served) -> Response:
    body = await read_body(request, DetokenizeBody)
    llm = served.model(body.model)
    try:
        text = llm.tokenizer.decode(body.tokens, skip_special=bool(body.skip_special))
    except _core.Error as error:
        raise from_engine(error) from None
    return JSONResponse({"content": text, "prompt": text})


async def embeddings(_: Request, served: Served) -> Response:
    served.model()
    raise ApiError(400, f"{served.name} is no embedding model", param="model", code="unsupported")


def _model(name: str, served: Served) -> dict[str, Any]:
    known = {"id": name, "object": "model", "created": served.created, "owned_by": "effinfer"}
    if served.llm is not None:
        known["max_model_len"] = served.llm.engine.max_seq_len
    return known

"""POST /v1/responses: text in, text and calls of functions out. Nothing is kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pydantic
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from effinfer.requests.async_generation import AsyncRequest
from effinfer.serve.answer import Answer, start_answer, usage_of, wait_for_answer
from effinfer.serve.body import explain, read_body
from effinfer.serve.errors import ApiError
from effinfer.serve.parsing import AnswerParser
from effinfer.serve.prompt import Conversation, conversation_of
from effinfer.serve.responses_items import ResponseItems
from effinfer.serve.responses_schema import ResponsesBody, as_chat, in_terms_of_responses
from effinfer.serve.sampling import prompt_room, sampling_params
from effinfer.serve.schemas import ChatBody
from effinfer.serve.served import Served
from effinfer.serve.stream import EventStream

ROUTE = "/v1/responses"


async def responses(request: Request, served: Served) -> Response:
    body = await read_body(request, ResponsesBody)
    llm = served.model(body.model)
    try:
        chat = _chat(body)
        conversation = await conversation_of(chat, served)
        room = prompt_room(conversation.ids, llm.engine.max_seq_len, "messages")
        params = sampling_params(
            chat,
            max_tokens=min(body.max_output_tokens or room, room),
            logprobs=None,
            llm=llm,
            constraint=conversation.constraint,
        )
        answer = await start_answer(
            served,
            ROUTE,
            "resp",
            [(conversation.ids, params)],
            is_streamed=bool(body.stream),
            keep_special=conversation.keep_special,
            schema_field=conversation.schema_field,
        )
    except ApiError as error:
        raise in_terms_of_responses(error) from None
    events = _Events(answer, body, conversation)
    if body.stream:
        return EventStream(answer, events)
    await wait_for_answer(request, answer)
    (choice,) = answer.choices
    _ = [*events.grow(0, choice, choice.state.text.text), *events.end()]
    return JSONResponse(events.response)


class _Events:
    def __init__(self, answer: Answer, body: ResponsesBody, conversation: Conversation) -> None:
        self._answer = answer
        self._parser: AnswerParser = conversation.parser()
        self._items = ResponseItems()
        self.response = _response(answer, body)

    def begin(self) -> Iterator[str]:
        for kind in ("response.created", "response.in_progress"):
            yield self._items.event(kind, response=self.response)

    def grow(self, index: int, choice: AsyncRequest, text: str) -> Iterator[str]:
        del index  # there is one choice
        yield from self._items.add(self._parser.push(text, final=choice.ended))

    def end(self) -> Iterator[str]:
        yield from self._items.close()
        (output,) = self._answer.generation.outputs()
        status = "incomplete" if output.finish_reason == "length" else "completed"
        self.response |= {"status": status, "output": self._items.output, "usage": self._usage()}
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        yield self._items.event(f"response.{status}", response=self.response)

    def fail(self, error: ApiError) -> Iterator[str]:
        why = {"code": "server_error", "message": error.message}
        self.response |= {"status": "failed", "output": self._items.output, "error": why}
        yield self._items.event("response.failed", response=self.response)

    def _usage(self) -> dict[str, Any]:
        usage = usage_of(self._answer.generation.outputs())
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }


def _chat(body: ResponsesBody) -> ChatBody:
    given = as_chat(body)
    try:
        return ChatBody.model_validate(given)
    except pydantic.ValidationError as error:
        raise explain(error, given) from None


def _response(answer: Answer, body: ResponsesBody) -> dict[str, Any]:
    """Before anything is said."""
    given = body.model_dump(
        include={"instructions", "max_output_tokens", "temperature", "top_p", "user"}
    )
    choice = body.tool_choice or "auto"
    form = body.text.format if body.text is not None else None
    said = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
    return {
        "id": answer.id.replace("-", "_"),
        "object": "response",
        "created_at": answer.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": answer.served.name,
        "output": [],
        **given,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "text": {"format": said},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools or []],
        "truncation": "disabled",
        "usage": None,
    }

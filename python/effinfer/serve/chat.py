"""POST /v1/chat/completions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from effinfer.requests.async_generation import AsyncRequest
from effinfer.serve.answer import (
    Answer,
    start_answer,
    usage_of,
    visible_tokens,
    wait_for_answer,
)
from effinfer.serve.body import read_body
from effinfer.serve.errors import ApiError
from effinfer.serve.parsing import AnswerParser, Delta
from effinfer.serve.prompt import Conversation, conversation_of
from effinfer.serve.sampling import (
    chat_logprobs,
    check_stream_options,
    prompt_room,
    sampling_params,
)
from effinfer.serve.schemas import ChatBody
from effinfer.serve.served import Served
from effinfer.serve.stream import EventStream, data_event
from effinfer.serve.tools.calls import CallDelta, ToolCall

ROUTE = "/v1/chat/completions"


async def chat(request: Request, served: Served) -> Response:
    body = await read_body(request, ChatBody)
    llm = served.model(body.model)
    with_usage = check_stream_options(body)
    conversation = await conversation_of(body, served)
    room = prompt_room(conversation.ids, llm.engine.max_seq_len, "messages")
    params = sampling_params(
        body,
        max_tokens=min(body.max_completion_tokens or body.max_tokens or room, room),
        logprobs=chat_logprobs(body),
        llm=llm,
        constraint=conversation.constraint,
    )
    answer = await start_answer(
        served,
        ROUTE,
        "chatcmpl",
        [(conversation.ids, params)],
        is_streamed=bool(body.stream),
        keep_special=conversation.keep_special,
        schema_field=conversation.schema_field,
    )
    if body.stream:
        return EventStream(answer, _Events(answer, conversation, with_usage))
    await wait_for_answer(request, answer)
    choices = [
        _choice(answer, index, choice, conversation.parser())
        for index, choice in enumerate(answer.choices)
    ]
    usage = usage_of(answer.generation.outputs())
    head = _head(answer, "chat.completion")
    return JSONResponse({**head, "choices": choices, "usage": usage})


class _Events:
    def __init__(self, answer: Answer, conversation: Conversation, with_usage: bool) -> None:
        self._answer = answer
        self._with_usage = with_usage
        self._parsers = [conversation.parser() for _ in answer.choices]
        self._tokens = [0] * len(answer.choices)
        self._calls = [0] * len(answer.choices)
        head = json.dumps(_head(answer, "chat.completion.chunk"), ensure_ascii=False)
        self._head = f'data: {head[:-1]}, "choices": [{{"index": '
        self._tail = ', "usage": null}\n\n' if with_usage else "}\n\n"

    def begin(self) -> Iterator[str]:
        for index in range(len(self._parsers)):
            yield self._event(index, '{"role": "assistant", "content": ""}', "null", "null")

    def grow(self, index: int, choice: AsyncRequest, text: str) -> Iterator[str]:
        parser = self._parsers[index]
        delta = parser.push(text, final=choice.ended)
        logprobs = self._logprobs(index, choice)
        if not delta.is_empty() or logprobs != "null":
            yield self._event(index, self._delta(index, delta), logprobs, "null")
        if choice.ended and not choice.failed:
            reason = json.dumps(_finish_reason(choice, parser))
            yield self._event(index, "{}", "null", reason)

    def end(self) -> Iterator[str]:
        if self._with_usage:
            usage = usage_of(self._answer.generation.outputs())
            head = _head(self._answer, "chat.completion.chunk")
            yield data_event({**head, "choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    def fail(self, error: ApiError) -> Iterator[str]:
        yield data_event(error.to_dict())

    def _delta(self, index: int, delta: Delta) -> str:
        if not delta.calls and not delta.reasoning:
            return f'{{"content": {json.dumps(delta.content, ensure_ascii=False)}}}'
        fields: dict[str, Any] = {}
        if delta.reasoning:
            fields["reasoning_content"] = delta.reasoning
        if delta.content:
            fields["content"] = delta.content
        if delta.calls:
            fields["tool_calls"] = [self._call(index, part) for part in delta.calls]
        return json.dumps(fields, ensure_ascii=False)

    def _call(self, index: int, part: CallDelta) -> dict[str, Any]:
        """The first part names the call; later ones have more of its arguments."""
        self._calls[index] += part.is_first
        place = {"index": self._calls[index] - 1}
        if not part.is_first:
            return {**place, "function": {"arguments": part.arguments}}
        return {**place, **_call_dict(part.call, part.arguments)}

    def _logprobs(self, index: int, choice: AsyncRequest) -> str:
        if choice.state.params.logprobs is None:
            return "null"
        found = _logprobs(self._answer, choice, self._tokens[index])
        self._tokens[index] += len(found["content"])
        return json.dumps(found, ensure_ascii=False) if found["content"] else "null"

    def _event(self, index: int, delta: str, logprobs: str, reason: str) -> str:
        return (
            f'{self._head}{index}, "delta": {delta}, "logprobs": {logprobs}, '
            f'"finish_reason": {reason}}}]{self._tail}'
        )


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {
        "id": answer.id,
        "object": kind,
        "created": answer.created,
        "model": answer.served.name,
    }


def _choice(
    answer: Answer, index: int, choice: AsyncRequest, parser: AnswerParser
) -> dict[str, Any]:
    delta = parser.push(choice.state.text.text, final=True)
    message: dict[str, Any] = {"role": "assistant", "content": delta.content, "refusal": None}
    if delta.reasoning:
        message["reasoning_content"] = delta.reasoning
    if delta.calls:
        message["content"] = delta.content or None
        message["tool_calls"] = [_call_dict(part.call, part.arguments) for part in delta.calls]
    has_logprobs = choice.state.params.logprobs is not None
    return {
        "index": index,
        "message": message,
        "logprobs": _logprobs(answer, choice, 0) if has_logprobs else None,
        "finish_reason": _finish_reason(choice, parser),
    }


def _call_dict(call: ToolCall, arguments: str) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _finish_reason(choice: AsyncRequest, parser: AnswerParser) -> str:
    reason = choice.state.finish_reason
    return "tool_calls" if parser.has_calls and reason == "stop" else reason


def _logprobs(answer: Answer, choice: AsyncRequest, begin: int) -> dict[str, Any]:
    texts = answer.served.token_texts
    ids, logprobs = visible_tokens(choice, begin)
    entries = zip(ids, logprobs, strict=True)
    content = [texts.chat_entry(token, entry) for token, entry in entries]
    return {"content": content, "refusal": None}

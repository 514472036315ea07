"""POST /v1/completions: texts are continued as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from effinfer.async_llm import AsyncLLM
from effinfer.requests.async_generation import AsyncRequest
from effinfer.serve.answer import (
    Answer,
    start_answer,
    usage_of,
    visible_tokens,
    wait_for_answer,
)
from effinfer.serve.body import read_body
from effinfer.serve.echo import Echo
from effinfer.serve.errors import ApiError, unsupported
from effinfer.serve.sampling import (
    check_length,
    check_stream_options,
    prompt_room,
    sampling_params,
    schema_field_of,
)
from effinfer.serve.schemas import CompletionBody
from effinfer.serve.served import Served
from effinfer.serve.stream import EventStream, data_event
from effinfer.serve.token_texts import bounded

_MOST_CHOICES = 128
_DEFAULT_TOKENS = 16  # OpenAI's
ROUTE = "/v1/completions"


async def completions(request: Request, served: Served) -> Response:
    body = await read_body(request, CompletionBody)
    llm = served.model(body.model)
    with_usage = check_stream_options(body)
    _refuse(body)
    prompts = _prompts(body)
    if len(prompts) * (body.n or 1) > _MOST_CHOICES:
        raise ApiError(400, f"prompt: expected at most {_MOST_CHOICES} choices", param="prompt")
    for prompt in prompts:
        check_length(prompt, llm, "prompt")
    encoded = [await _encode(llm, prompt) for prompt in prompts]
    requests = []
    for ids in encoded:
        room = prompt_room(ids, llm.engine.max_seq_len, "prompt")
        wanted = _DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens
        params = sampling_params(
            body,
            max_tokens=min(wanted, room),
            logprobs=body.logprobs,
            llm=llm,
            constraint={},
            prompt_logprobs=_prompt_logprobs(body),
        )
        requests.append((ids, params))
    answer = await start_answer(
        served,
        ROUTE,
        "cmpl",
        requests,
        is_streamed=bool(body.stream),
        schema_field=schema_field_of(body),
    )
    texts = [_echo(llm, prompt) if body.echo else "" for prompt in prompts]
    echoes = [
        Echo(text, ids, leader, served.token_texts, body.logprobs is not None)
        for text, ids, leader in zip(texts, encoded, answer.choices[:: body.n or 1], strict=True)
    ]
    echoes = [echo for echo in echoes for _ in range(body.n or 1)]
    if body.stream:
        return EventStream(answer, _Events(answer, echoes, with_usage))
    await wait_for_answer(request, answer)
    choices = [
        _choice(answer, index, choice, echo)
        for index, (choice, echo) in enumerate(zip(answer.choices, echoes, strict=True))
    ]
    usage = usage_of(answer.generation.outputs())
    return JSONResponse({**_head(answer), "choices": choices, "usage": usage})


def _refuse(body: CompletionBody) -> None:
    if body.suffix:
        raise unsupported("suffix", "texts are continued at their end only")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "expected as many as n")
    if body.max_tokens == 0 and (not body.echo or (body.n or 1) > 1):
        why = "max_tokens: expected at least 1, or 0 with echo and one choice"
        raise ApiError(400, why, param="max_tokens", code="invalid_value")


def _prompt_logprobs(body: CompletionBody) -> int | None:
    """Without a token to generate the prompt is scored, for nothing else is left to do."""
    if not body.echo:
        return None
    return 0 if body.logprobs is None and body.max_tokens == 0 else body.logprobs


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    if isinstance(body.prompt, str):
        return [body.prompt]
    if not body.prompt:
        raise ApiError(400, "prompt: expected some text", param="prompt", code="invalid_value")
    if isinstance(body.prompt[0], int):
        return [body.prompt]  # checked by the schema
    return list(body.prompt)


async def _encode(llm: AsyncLLM, prompt: str | list[int]) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    return await llm.tokenize(prompt) if prompt else []


def _echo(llm: AsyncLLM, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    return llm.tokenizer.decode(prompt)


class _Events:
    def __init__(self, answer: Answer, echoes: list[Echo], with_usage: bool) -> None:
        self._answer = answer
        self._echoes = echoes
        self._unsaid = {index: echo for index, echo in enumerate(echoes) if echo.text}
        self._with_usage = with_usage
        self._offsets = [len(echo.text) for echo in echoes]
        self._tokens = [0] * len(echoes)
        head = json.dumps(_head(answer), ensure_ascii=False)
        self._head = f'data: {head[:-1]}, "choices": [{{"index": '
        self._tail = ', "usage": null}\n\n' if with_usage else "}\n\n"

    def begin(self) -> Iterator[str]:
        for index, echo in list(self._unsaid.items()):
            if not echo.has_logprobs:
                yield self._event(index, self._unsaid.pop(index).text, "null", "null")

    def grow(self, index: int, choice: AsyncRequest, text: str) -> Iterator[str]:
        # Log-probabilities of the prompt are there before the first token.
        echo = None if choice.failed else self._unsaid.pop(index, None)
        if echo is not None:
            scores = json.dumps(echo.logprobs(), ensure_ascii=False)
            yield self._event(index, echo.text, scores, "null")
        logprobs = "null"
        if choice.state.params.logprobs is not None:
            found = _logprobs(self._answer, choice, self._tokens[index], self._offsets[index])
            self._tokens[index] += len(found["tokens"])
            self._offsets[index] += sum(map(len, found["tokens"]))
            logprobs = json.dumps(found, ensure_ascii=False)
        is_end = choice.ended and not choice.failed
        reason = f'"{choice.state.finish_reason}"' if is_end else "null"
        yield self._event(index, text, logprobs, reason)

    def end(self) -> Iterator[str]:
        if self._with_usage:
            usage = usage_of(self._answer.generation.outputs())
            yield data_event({**_head(self._answer), "choices": [], "usage": usage})
        yield "data: [DONE]\n\n"

    def fail(self, error: ApiError) -> Iterator[str]:
        yield data_event(error.to_dict())

    def _event(self, index: int, text: str, logprobs: str, reason: str) -> str:
        quoted = json.dumps(text, ensure_ascii=False)
        return (
            f'{self._head}{index}, "text": {quoted}, "logprobs": {logprobs}, '
            f'"finish_reason": {reason}}}]{self._tail}'
        )


def _head(answer: Answer) -> dict[str, Any]:
    return {
        "id": answer.id,
        "object": "text_completion",
        "created": answer.created,
        "model": answer.served.name,
    }


def _choice(answer: Answer, index: int, choice: AsyncRequest, echo: Echo) -> dict[str, Any]:
    logprobs = None
    if choice.state.params.logprobs is not None:
        logprobs = _logprobs(answer, choice, 0, len(echo.text))
        if echo.text:
            logprobs = {name: [*first, *logprobs[name]] for name, first in echo.logprobs().items()}
    return {
        "index": index,
        "text": echo.text + choice.state.text.text,
        "logprobs": logprobs,
        "finish_reason": choice.state.finish_reason,
    }


def _logprobs(answer: Answer, choice: AsyncRequest, begin: int, offset: int) -> dict[str, Any]:
    texts = answer.served.token_texts
    ids, logprobs = visible_tokens(choice, begin)
    tokens = [texts.text_of(token) for token in ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [bounded(entry.logprob) for entry in logprobs],
        "top_logprobs": [
            {texts.text_of(token): bounded(logprob) for token, logprob in entry.top}
            for entry in logprobs
        ],
        "text_offset": offsets,
    }

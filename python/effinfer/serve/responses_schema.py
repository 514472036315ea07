"""The body of POST /v1/responses, and the chat that it means."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field

from effinfer.serve.errors import ApiError, unsupported
from effinfer.serve.schemas import Body, Count, Ignored, Objects, Penalty, Probability


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(Body):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class FunctionTool(Body):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(Body):
    type: Literal["function"]
    name: str


class ResponsesBody(Ignored):
    model: str | None = None
    input: str | Objects
    instructions: str | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: int | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Probability | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[str], Field(max_length=64)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # What needs answers that the server would have to keep.
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    top_logprobs: int | None = None
    # Beyond OpenAI's.
    seed: int | None = None
    top_k: int | None = None
    min_p: Probability | None = None
    repetition_penalty: float | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_SAME_NAMES = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "seed",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "chat_template_kwargs",
)


def as_chat(body: ResponsesBody) -> dict[str, Any]:
    """The body of a chat completion that asks for the same. Throws ApiError."""
    _refuse(body)
    chat: dict[str, Any] = {name: getattr(body, name) for name in _SAME_NAMES}
    chat["messages"] = _messages(body)
    chat["max_completion_tokens"] = body.max_output_tokens
    chat["tools"] = [
        {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
        for tool in body.tools or []
    ]
    if isinstance(body.tool_choice, FunctionChoice):
        name = {"name": body.tool_choice.name}
        chat["tool_choice"] = {"type": "function", "function": name}
    else:
        chat["tool_choice"] = body.tool_choice
    if body.reasoning is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    form = body.text.format if body.text is not None else None
    if form is not None:
        chat["response_format"] = {"type": form.type}
        if form.type == "json_schema":
            schema = {"name": form.name, "schema": form.schema_, "strict": form.strict}
            chat["response_format"]["json_schema"] = schema
    return {key: value for key, value in chat.items() if value is not None}


# What a chat completion calls it, and what its name is here.
_NAMES_HERE = (
    (re.compile(r"messages.*"), "input"),  # items and messages are not one to one
    (re.compile(r"(tools\[\d+\]|tool_choice)\.function"), r"\1"),
    (re.compile(r"response_format\.json_schema"), "text.format"),
    (re.compile(r"response_format"), "text.format"),
    (re.compile(r"reasoning_effort"), "reasoning.effort"),
)


def in_terms_of_responses(error: ApiError) -> ApiError:
    """An error of the chat that as_chat() made."""
    param = error.param or ""
    for there, here in _NAMES_HERE:
        if there.match(param):
            named = there.sub(here, param, count=1)
            message = error.message.replace(param, named, 1)
            return ApiError(error.status, message, param=named, code=error.code)
    return error


def _refuse(body: ResponsesBody) -> None:
    kept = "answers are not kept; send the whole conversation as input"
    if body.previous_response_id is not None:
        raise unsupported("previous_response_id", kept)
    if body.conversation is not None:
        raise unsupported("conversation", kept)
    if body.background:
        raise unsupported("background", kept)
    if body.prompt is not None:
        raise unsupported("prompt", "there are no stored prompts")
    if body.top_logprobs:
        raise unsupported("top_logprobs", "chat completions have log-probabilities")
    if "message.output_text.logprobs" in (body.include or ()):
        raise unsupported("include", "chat completions have log-probabilities")
    if body.truncation == "auto":
        raise unsupported("truncation", "conversations that are too long are refused")


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for index, item in enumerate(body.input):
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not messages or "tool_calls" not in messages[-1]:
                messages.append({"role": "assistant", "content": None, "tool_calls": []})
            messages[-1]["tool_calls"].append(call)
        elif kind == "function_call_output":
            content = item.get("output")
            call_id = item.get("call_id")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        elif kind != "reasoning":  # templates drop earlier thoughts anyway
            place = f"input[{index}].type"
            raise ApiError(400, f"{place}: unsupported", param=place, code="invalid_value")
    return messages

"""The conversation of a request's body, as the model will read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from effinfer import _core
from effinfer.serve.errors import ApiError, from_engine, unsupported
from effinfer.serve.parsing import AnswerParser
from effinfer.serve.sampling import check_length, constraint_of, schema_field_of
from effinfer.serve.schemas import ChatBody, NamedTool, Tool
from effinfer.serve.served import Served
from effinfer.serve.tools import JSON, ToolFormat, find_format
from effinfer.serve.tools.calls import call_schema

_ROLES = {"system", "developer", "user", "assistant", "tool"}
# What a template is given by the server; a client may set other names.
_RESERVED = {
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "raise_exception",
    "strftime_now",
    "self",
}


@dataclass
class Conversation:
    ids: list[int]
    is_thinking: bool  # the prompt has opened the model's thought
    tools: ToolFormat | None  # how calls are written, where the answer may have some
    tool_names: frozenset[str]
    has_parallel_calls: bool
    constraint: dict[str, Any]
    schema_field: str  # of the body, where a JSON schema in `constraint` comes from

    def parser(self) -> AnswerParser:
        tools = None if self.tools is None else self.tools.parser(self.tool_names)
        return AnswerParser(self.is_thinking, tools, is_parallel=self.has_parallel_calls)

    @property
    def keep_special(self) -> bool:
        return self.tools is not None and self.tools.has_control_tokens


async def conversation_of(body: ChatBody, served: Served) -> Conversation:
    """Throws ApiError."""
    llm = served.model()
    try:
        _ = llm.chat_template
    except _core.InvalidArgumentError:  # its text says where the file lies
        why = f"{served.name} has no chat template; use /v1/completions"
        raise ApiError(400, why, param="model", code="unsupported") from None
    check_length(body.messages, llm, "messages")
    messages = [_message(f"messages[{i}]", given) for i, given in enumerate(body.messages)]
    variables = _variables(body)
    try:
        tools, constraint = _tools(body, served)
        if tools is not None:
            variables["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools or []]
        ids = await llm.chat_tokens(messages, **variables)
        tail = llm.tokenizer.decode(ids[-8:], skip_special=False)
    except _core.Error as error:
        raise from_engine(error) from None
    return Conversation(
        ids=ids,
        # What a grammar writes begins with the answer.
        is_thinking=tail.rstrip().endswith("<think>") and not constraint,
        tools=tools,
        tool_names=frozenset(tool.function.name for tool in body.tools or []),
        has_parallel_calls=body.parallel_tool_calls is not False,
        constraint=constraint,
        schema_field="tools" if _has_to_call(body) else schema_field_of(body),
    )


def _message(where: str, given: Mapping[str, Any]) -> dict[str, Any]:
    role = given.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise ApiError(
            400,
            f"{where}.role: expected one of {', '.join(sorted(_ROLES))}",
            param=f"{where}.role",
            code="invalid_value",
        )
    # Clients send null for what they do not mean; templates would take that for a value.
    message = {key: value for key, value in given.items() if value is not None}
    # Templates know the older name.
    return {**message, "role": "system" if role == "developer" else role}


def _variables(body: ChatBody) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    for name in variables:
        if name in _RESERVED or not name.isidentifier():
            place = f"chat_template_kwargs.{name[:40]}"
            raise ApiError(400, f"{place}: this name is the server's", param=place)
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    return variables


def _has_to_call(body: ChatBody) -> bool:
    return bool(body.tools) and body.tool_choice not in (None, "none", "auto")


def _tools(body: ChatBody, served: Served) -> tuple[ToolFormat | None, dict[str, Any]]:
    """How tools are called, and the grammar that makes the model call one."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice: expected tools", param="tool_choice")
        return None, constraint_of(body)
    if choice == "none":
        return None, constraint_of(body)
    if not _has_to_call(body):
        template = served.model().chat_template.source
        return find_format(template, served.tool_parser), constraint_of(body)
    if constraint_of(body):
        raise unsupported("tool_choice", "expected no response_format beside it")
    functions = [tool.function.model_dump() for tool in _chosen(body.tools, choice)]
    return JSON, {"json_schema": call_schema(functions, body.parallel_tool_calls is not False)}


def _chosen(tools: list[Tool], choice: Any) -> list[Tool]:
    if not isinstance(choice, NamedTool):
        return tools
    named = [tool for tool in tools if tool.function.name == choice.function.name]
    if not named:
        raise ApiError(
            400, "tool_choice.function.name: no such tool", param="tool_choice.function.name"
        )
    return named

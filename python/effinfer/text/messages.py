"""Messages of a conversation, checked and in the one form that templates read."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from effinfer import _core

Message = Mapping[str, Any]

# A template makes control tokens of roles, as in '<|' + role + '|>'.
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies whose content is a string: that of text parts joined, "" for the None beside tool
    calls. Arguments of tool calls are objects where their JSON is one. Throws InvalidArgumentError
    that names the place."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise _wrong("messages", "a list of {role, content}", messages)
    if not messages:
        raise _core.InvalidArgumentError("[chat] messages: expected at least one")
    return [_check_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _check_message(where: str, message: Message) -> dict[str, Any]:
    if not isinstance(message, Mapping) or "role" not in message:
        raise _wrong(where, "a mapping with role and content", message)
    role = message["role"]
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise _wrong(f"{where}.role", "a name such as 'user'", role)
    checked = dict(message)
    calls = message.get("tool_calls")
    if calls is None:
        checked.pop("tool_calls", None)
    else:
        checked["tool_calls"] = _check_calls(f"{where}.tool_calls", calls)
    content = message.get("content")
    if content is None and calls:
        checked["content"] = ""
    else:
        checked["content"] = _check_content(f"{where}.content", content)
    return checked


def _check_content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        raise _wrong(where, "a text or a list of text parts", content)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text", "output_text"):
            raise _wrong(f"{where}[{index}]", 'a part of type "text"', part)
        text = part.get("text")
        if not isinstance(text, str):
            raise _wrong(f"{where}[{index}].text", "a text", text)
        texts.append(text)
    return "".join(texts)


def _check_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    if isinstance(calls, str | Mapping) or not isinstance(calls, Sequence):
        raise _wrong(where, "a list", calls)
    checked = []
    for index, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise _wrong(f"{where}[{index}]", "a function with a name and arguments", call)
        function = {**function, "arguments": _arguments(function.get("arguments"))}
        checked.append({**call, "type": "function", "function": function})
    return checked


def _arguments(given: Any) -> Any:
    """Clients send JSON in a string; templates write objects."""
    if not isinstance(given, str):
        return {} if given is None else given
    try:
        value = json.loads(given)
    except (ValueError, RecursionError):
        return given
    return value if isinstance(value, dict) else given


def _wrong(where: str, expected: str, got: Any) -> _core.Error:
    shown = repr(got)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return _core.InvalidArgumentError(f"[chat] {where}: expected {expected}, got {shown}")

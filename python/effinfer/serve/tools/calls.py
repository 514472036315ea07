"""Calls of tools, and the JSON that they are written in."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

_WHITE = " \t\r\n"


@dataclass
class ToolCall:
    name: str
    arguments: str  # JSON
    # Letters and digits, nine of them: templates of Mistral's refuse others.
    id: str = field(default_factory=lambda: secrets.token_hex(5)[:9])


class ToolParser(Protocol):
    """One answer's text as it comes."""

    def push(self, piece: str, *, final: bool) -> tuple[str, list[ToolCall]]:
        """(content, calls) that became certain."""


class JsonEnd:
    """Finds where a JSON object or array ends, in text that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find(self, text: str, begin: int) -> int | None:
        """The place after the value's end; `begin` is what was looked at before."""
        for place in range(begin, len(text)):
            letter = text[place]
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = letter == "\\"
                self._in_string = letter != '"'
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1
        return None


def calls_in(text: str, names: Collection[str] | None = None) -> list[ToolCall]:
    """The calls that a JSON value writes: one object, or a list of them. None of them when one is
    no call: without a name (of `names`, where given) or without arguments."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    found = [_call(item, names) for item in (value if isinstance(value, list) else [value])]
    calls = [call for call in found if call is not None]
    return calls if len(calls) == len(found) else []


def _call(value: Any, names: Collection[str] | None) -> ToolCall | None:
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or (names is not None and name not in names):
        return None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


def call_schema(tools: Iterable[dict[str, Any]], is_parallel: bool) -> dict[str, Any]:
    """The JSON schema of a list of calls of these functions."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["name"]},
                "arguments": tool.get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    most = {} if is_parallel else {"maxItems": 1}
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most}

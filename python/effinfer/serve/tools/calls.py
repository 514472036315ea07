"""Calls of tools, as they grow."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass
class ToolCall:
    name: str
    # What the model has written so far: JSON, unless it erred or was cut off.
    arguments: str = ""
    # Letters and digits, nine of them: templates of Mistral's refuse others.
    id: str = field(default_factory=lambda: secrets.token_hex(5)[:9])


@dataclass
class CallDelta:
    """What a piece of text adds to a call."""

    call: ToolCall
    is_first: bool
    arguments: str


class ToolParser(Protocol):
    """One answer's text as it comes. What it finds does not depend on where the text is cut."""

    def push(self, piece: str, *, final: bool) -> tuple[str, list[CallDelta]]:
        """(content, calls) that became certain. A call begins once its name and the first letter of
        its arguments are known; what is no call by then is content."""


def grow(calls: list[CallDelta], new: Iterable[CallDelta]) -> None:
    """Adds `new` to `calls`: neighbouring parts of one call become one."""
    for delta in new:
        if calls and calls[-1].call is delta.call:
            calls[-1].arguments += delta.arguments
        else:
            calls.append(delta)


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

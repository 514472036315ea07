"""Mistral's calls, after a control token: a list, or the name of each before its arguments.

[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]
[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from effinfer.serve.held import held_back
from effinfer.serve.tools.calls import ToolCall, calls_in

_TAG = "[TOOL_CALLS]"
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(\{.*)", re.DOTALL)


class MistralParser:
    def __init__(self, names: Collection[str]) -> None:
        del names  # the control token says that it is a call
        self._text = ""
        self._has_tag = False

    def push(self, piece: str, *, final: bool) -> tuple[str, list[ToolCall]]:
        """Calls are the end of an answer: they are read when it is whole."""
        self._text += piece
        content = ""
        if not self._has_tag:
            content, tag, rest = self._text.partition(_TAG)
            self._has_tag = bool(tag)
            if tag:
                self._text = rest
            else:
                end = len(content) - (0 if final else held_back(content, _TAG))
                content, self._text = content[:end], content[end:]
        if not final or not self._has_tag:
            return content, []
        calls: list[ToolCall] = []
        for part in self._text.split(_TAG):
            found = _calls(part)
            if not found:
                return content + _TAG + self._text, []
            calls += found
        self._text = ""
        return content, calls


def _calls(text: str) -> list[ToolCall]:
    named = _NAMED.fullmatch(text)
    if not named:
        return calls_in(text)
    try:
        arguments = json.loads(named[2])
    except (ValueError, RecursionError):
        return []
    if not isinstance(arguments, dict):
        return []
    return [ToolCall(named[1], json.dumps(arguments, ensure_ascii=False))]

"""Calls between tags: Hermes, and Qwen after it.

<tool_call>
{"name": "f", "arguments": {"x": 1}}
</tool_call>
"""

from __future__ import annotations

from collections.abc import Collection

from effinfer.serve.held import held_back
from effinfer.serve.tools.calls import ToolCall, calls_in

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class TaggedParser:
    def __init__(self, names: Collection[str]) -> None:
        del names  # the tags say that it is a call, whichever name the model made up
        self._text = ""
        self._in_call = False
        self._after_call = False

    def push(self, piece: str, *, final: bool) -> tuple[str, list[ToolCall]]:
        self._text += piece
        content: list[str] = []
        calls: list[ToolCall] = []
        while True:
            tag = _CLOSE if self._in_call else _OPEN
            # The part that was looked at before holds no tag, but may hold the beginning of one.
            before, found, after = self._text.partition(tag)
            if not found:
                break
            self._text = after
            if self._in_call:
                new = calls_in(before)
                calls += new
                content += [] if new else [_OPEN, before, _CLOSE]
            else:
                content.append(before)
            self._after_call = self._in_call
            self._in_call = not self._in_call
        if final and self._in_call:  # models leave the last tag out, or are cut off
            new = calls_in(self._text)
            calls += new
            content += [] if new else [_OPEN, self._text]
            self._text = ""
        elif not self._in_call:
            end = len(self._text) - (0 if final else held_back(self._text, _OPEN))
            content.append(self._text[:end])
            self._text = self._text[end:]
        text = "".join(content)
        # White space around calls is the format's.
        return ("" if (calls or self._after_call) and not text.strip() else text), calls

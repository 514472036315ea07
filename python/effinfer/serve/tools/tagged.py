"""Calls between tags: Hermes, and Qwen after it.

<tool_call>
{"name": "f", "arguments": {"x": 1}}
</tool_call>
"""

from __future__ import annotations

from collections.abc import Collection

from effinfer.serve.tools.calls import grow
from effinfer.serve.tools.json_calls import WHITE, CallsReader
from effinfer.serve.tools.marked import MarkedParser

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class TaggedParser(MarkedParser):
    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        del names  # the tags say that it is a call, whichever name the model made up
        self._reader: CallsReader | None = None  # between tags
        self._expects_close = False

    def _take_part(self, final: bool) -> bool:
        if self._expects_close:
            return self._take_close(final)
        if self._reader is not None:
            return self._take_calls(self._reader, final)
        before, tag = self._split(_OPEN, final)
        self._add_content(before)
        self._reader = CallsReader() if tag else None
        return bool(tag)

    def _take_calls(self, reader: CallsReader, final: bool) -> bool:
        before, tag = self._split(_CLOSE, final)
        calls, rest = reader.push(before)
        grow(self._calls, calls)
        if not reader.ended:
            if not tag and not final:
                return False
            rest = reader.finish()  # models leave the last tag out, or are cut off
        self._text = rest + tag + self._text
        self._reader, self._after_call = None, reader.has_calls
        if reader.has_calls and not reader.is_broken and (reader.ended or not rest):
            self._expects_close = True
        elif not reader.has_calls:
            self._add_content(_OPEN)
        return True

    def _take_close(self, final: bool) -> bool:
        text = self._text.lstrip(WHITE)
        if not final and text != _CLOSE and _CLOSE.startswith(text):
            return False
        self._text = text.removeprefix(_CLOSE)
        self._expects_close = False
        return True

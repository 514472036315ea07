"""Mistral's calls, after a control token: a list, or the name of each before its arguments.

[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]
[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[CALL_ID]123456789[ARGS]{}
"""

from __future__ import annotations

import re
from collections.abc import Collection

from effinfer.serve.tools.calls import grow
from effinfer.serve.tools.json_calls import WHITE, ArgumentsReader, CallsReader
from effinfer.serve.tools.marked import MarkedParser

_TAG = "[TOOL_CALLS]"
_NAME = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*")


class MistralParser(MarkedParser):
    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        del names  # the control token says that it is a call
        self._has_tag = False
        self._reader: CallsReader | ArgumentsReader | None = None

    def _take_part(self, final: bool) -> bool:
        if isinstance(self._reader, ArgumentsReader):
            return self._take_arguments(self._reader)
        if self._reader is not None:
            return self._take_calls(self._reader, final)
        if self._has_tag:
            return self._take_name(final)
        before, tag = self._split(_TAG, final)
        self._add_content(before)
        self._has_tag = bool(tag)
        return bool(tag)

    def _take_name(self, final: bool) -> bool:
        """What follows the control token: JSON, or a name and then arguments."""
        text = self._text.lstrip(WHITE)
        head, brace, _ = self._text.partition("{")
        if not final and (not text or (text[0] not in "[{" and not brace)):
            return False
        named = _NAME.fullmatch(head) if brace else None
        if text.startswith(("[", "{")):
            self._reader = CallsReader()
        elif named:
            self._reader = ArgumentsReader(named[1])
            self._text = self._text[len(head) :]
        else:
            self._end_calls(has_calls=False)
        return True

    def _take_arguments(self, reader: ArgumentsReader) -> bool:
        if not self._text:
            return False
        delta, self._text = reader.push(self._text)
        grow(self._calls, [delta])
        if reader.ended:
            self._end_calls(has_calls=True)
        return reader.ended

    def _take_calls(self, reader: CallsReader, final: bool) -> bool:
        calls, self._text = reader.push(self._text)
        grow(self._calls, calls)
        if not reader.ended:
            if not final:
                return False
            self._text = reader.finish()
        self._end_calls(has_calls=reader.has_calls)
        return True

    def _end_calls(self, has_calls: bool) -> None:
        self._reader, self._has_tag, self._after_call = None, False, has_calls
        if not has_calls:
            self._add_content(_TAG)

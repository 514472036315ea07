"""Calls that are the whole answer, as JSON: Llama 3, Gemma, and answers that a grammar wrote.

    {"name": "f", "parameters": {"x": 1}}

Llama 3 may write <|python_tag|> before it and semicolons between calls; Gemma may write the JSON in
a fenced block.
"""

from __future__ import annotations

from collections.abc import Collection

from effinfer.serve.tools.calls import CallDelta, grow
from effinfer.serve.tools.json_calls import WHITE, CallsReader

_OPENINGS = ("<|python_tag|>", "```json", "```tool_call", "```tool_code", "```")
_BETWEEN = WHITE + ";,`"


class PlainParser:
    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._text = ""  # not read yet
        self._opening = ""  # before the first call; what is no call takes it back
        self._reader: CallsReader | None = None
        self._has_calls = False
        self._is_text = False  # text that is no call ends the search: what follows is content
        self._calls: list[CallDelta] = []

    def push(self, piece: str, *, final: bool) -> tuple[str, list[CallDelta]]:
        self._text += piece
        self._calls = []
        while not self._is_text and self._take_part(final):
            pass
        content = ""
        if self._is_text or final:
            content, self._text = self._text, ""
        return content, self._calls

    def _take_part(self, final: bool) -> bool:
        """Reads on to where something else begins; False when that has not come."""
        if self._reader is None:
            return self._find_begin(final)
        reader = self._reader
        calls, self._text = reader.push(self._text)
        grow(self._calls, calls)
        if not reader.ended:
            if not final:
                return False
            self._text = reader.finish()
        self._reader = None
        self._has_calls |= reader.has_calls
        self._is_text = reader.is_broken or not reader.has_calls
        if not reader.has_calls:
            self._text = self._opening + self._text
        return True

    def _find_begin(self, final: bool) -> bool:
        """Where JSON begins."""
        rest = self._text.lstrip(_BETWEEN if self._has_calls else WHITE)
        may_follow = not rest
        if not self._has_calls:
            may_follow |= any(opening.startswith(rest) for opening in _OPENINGS)
            opening = next((o for o in _OPENINGS if rest.startswith(o)), "")
            rest = rest[len(opening) :].lstrip(WHITE)
            may_follow |= not rest
        if rest.startswith(("{", "[")):
            size = len(self._text) - len(rest)
            self._opening, self._text = self._text[:size], rest
            self._reader = CallsReader(self._names)
            return True
        self._is_text = final or not may_follow
        if final and self._has_calls and not rest:
            self._text = ""  # what lies between calls belongs to the format
        return False

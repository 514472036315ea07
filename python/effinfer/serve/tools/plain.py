"""Calls that are the whole answer, as JSON: Llama 3, Gemma, and answers that a grammar wrote.

    {"name": "f", "parameters": {"x": 1}}

Llama 3 may write <|python_tag|> before it and semicolons between calls; Gemma may write the JSON in
a fenced block.
"""

from __future__ import annotations

from collections.abc import Collection

from effinfer.serve.tools.calls import JsonEnd, ToolCall, calls_in

_OPENINGS = ("<|python_tag|>", "```json", "```tool_call", "```tool_code", "```")
_BETWEEN = " \t\r\n;,`"


class PlainParser:
    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._text = ""  # held back
        self._scanned = 0
        self._end = JsonEnd()
        self._state = "begin"
        self._has_calls = False

    def push(self, piece: str, *, final: bool) -> tuple[str, list[ToolCall]]:
        if self._state == "text":
            return piece, []
        self._text += piece
        calls: list[ToolCall] = []
        while self._state != "text":
            found = self._next_call(final)
            if found is None:
                break
            calls += found
        if self._state == "text" or final:
            text, self._text = self._text, ""
            is_between = self._has_calls and not text.strip(_BETWEEN)
            return "" if is_between else text, calls
        return "", calls

    def _next_call(self, final: bool) -> list[ToolCall] | None:
        """Calls of the next JSON value; None when it has not come. Text that is no call ends the
        search: it and what follows is content."""
        begin = self._find_begin(final)
        if begin is None:
            return None
        end = self._end.find(self._text, max(begin, self._scanned))
        if end is None:
            self._scanned = len(self._text)
            return None
        calls = calls_in(self._text[begin:end], self._names)
        if not calls:
            self._state = "text"
            return []
        self._text, self._scanned, self._end = self._text[end:], 0, JsonEnd()
        self._state, self._has_calls = "between", True
        return calls

    def _find_begin(self, final: bool) -> int | None:
        """Where JSON begins."""
        skipped = _BETWEEN if self._state == "between" else " \t\r\n"
        rest = self._text.lstrip(skipped)
        may_follow = not rest
        if self._state == "begin":
            may_follow |= any(opening.startswith(rest) for opening in _OPENINGS)
            opening = next((o for o in _OPENINGS if rest.startswith(o)), "")
            rest = rest[len(opening) :].lstrip()
            may_follow |= not rest
        if rest.startswith(("{", "[")):
            return len(self._text) - len(rest)
        if not may_follow or final:
            self._state = "text"
        return None

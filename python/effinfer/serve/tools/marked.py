"""What parsers of calls behind marks have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod

from effinfer.serve.held import held_back
from effinfer.serve.tools.calls import CallDelta
from effinfer.serve.tools.json_calls import WHITE


class MarkedParser(ABC):
    def __init__(self) -> None:
        self._text = ""  # not read yet
        self._after_call = False
        self._content = ""
        self._calls: list[CallDelta] = []

    def push(self, piece: str, *, final: bool) -> tuple[str, list[CallDelta]]:
        self._text += piece
        self._content, self._calls = "", []
        while self._take_part(final):
            pass
        return self._content, self._calls

    @abstractmethod
    def _take_part(self, final: bool) -> bool:
        """Reads on to where something else begins; False when that has not come."""

    def _split(self, mark: str, final: bool) -> tuple[str, str]:
        """Takes the text before a mark, and the mark, which is "" when it has not come. What may
        begin it is left."""
        before, found, after = self._text.partition(mark)
        size = len(before) if found or final else len(before) - held_back(before, mark)
        self._text = after if found else before[size:]
        return before[:size], found

    def _add_content(self, text: str) -> None:
        if self._after_call:  # white space around calls is the format's
            text = text.lstrip(WHITE)
        self._after_call &= not text
        self._content += text

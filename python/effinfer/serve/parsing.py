"""The parts of an answer's text: thoughts, content, calls of tools.

Text comes in pieces of any length. A parser gives on what is certain and holds back what may be the
beginning of a tag.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from effinfer.serve.held import held_back
from effinfer.serve.tools.calls import CallDelta, ToolCall, ToolParser

_OPEN, _CLOSE = "<think>", "</think>"


@dataclass
class Delta:
    """What a piece of text adds."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def is_empty(self) -> bool:
        return not (self.content or self.reasoning or self.calls)


class _Thoughts:
    """Splits off what a model thinks before it answers."""

    def __init__(self, is_thinking: bool) -> None:
        """is_thinking: the prompt has opened the thought."""
        self._state = "thinking" if is_thinking else "begin"
        self._text = ""

    def push(self, piece: str, *, final: bool) -> tuple[str, str]:
        """(thoughts, content)"""
        self._text += piece
        if self._state == "begin":
            begin = self._text.lstrip()
            if begin.startswith(_OPEN):
                self._state, self._text = "thinking", begin[len(_OPEN) :]
            elif final or not _OPEN.startswith(begin):
                self._state = "answering"
            else:
                return "", ""
        if self._state == "answering":
            text, self._text = self._text, ""
            return "", text
        thoughts, tag, content = self._text.partition(_CLOSE)
        if tag:
            self._state, self._text = "answering", ""
            return thoughts, content.lstrip("\n")
        keep = 0 if final else held_back(self._text, _CLOSE)
        end = len(self._text) - keep
        thoughts, self._text = self._text[:end], self._text[end:]
        return thoughts, ""


class AnswerParser:
    """One choice's text as it comes."""

    def __init__(
        self, is_thinking: bool, tools: ToolParser | None, *, is_parallel: bool = True
    ) -> None:
        """is_parallel: there may be several calls; else those behind the first are left out."""
        self._thoughts = _Thoughts(is_thinking)
        self._tools = tools
        self._is_parallel = is_parallel
        self._first: ToolCall | None = None

    @property
    def has_calls(self) -> bool:
        return self._first is not None

    def push(self, piece: str, *, final: bool) -> Delta:
        reasoning, content = self._thoughts.push(piece, final=final)
        if self._tools is None:
            return Delta(content, reasoning)
        content, calls = self._tools.push(content, final=final)
        if calls and self._first is None:
            self._first = calls[0].call
        if not self._is_parallel:
            calls = [part for part in calls if part.call is self._first]
        return Delta(content, reasoning, calls)

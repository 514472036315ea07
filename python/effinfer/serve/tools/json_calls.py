"""Calls that are JSON, read as the text comes: {"name": "f", "arguments": {"x": 1}}, or a list."""

from __future__ import annotations

import json
from collections.abc import Collection, Generator
from typing import TypeVar

from effinfer.serve.tools.calls import CallDelta, ToolCall, grow

WHITE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")
_Result = TypeVar("_Result")
# What reads a part of the text: it is sent letter by letter.
_Reading = Generator[None, str, _Result]


class _NoCallError(Exception):
    """The text is something else."""


class JsonEnd:
    """Finds where a JSON object, array or string ends."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def ends(self, letter: str) -> bool:
        """Whether it ends with this letter, which follows the one before."""
        if self._escaped:
            self._escaped = False
        elif self._in_string:
            self._escaped = letter == "\\"
            self._in_string = letter != '"'
            return not self._in_string and not self._depth
        elif letter == '"':
            self._in_string = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
            return self._depth <= 0
        return False


class ArgumentsReader:
    """The arguments of a call that has begun: a JSON object, given on as it comes."""

    def __init__(self, name: str) -> None:
        self.ended = False
        self._call = ToolCall(name)
        self._is_first = True
        self._end = JsonEnd()

    def push(self, text: str) -> tuple[CallDelta, str]:
        """What `text` adds, and what of it follows the object."""
        size = len(text)
        for place, letter in enumerate(text, 1):
            if self._end.ends(letter):
                self.ended, size = True, place
                break
        self._call.arguments += text[:size]
        delta = CallDelta(self._call, self._is_first, text[:size])
        self._is_first = False
        return delta, text[size:]


class CallsReader:
    """One JSON value: a call, or a list of calls. A call has a name, one of `names` where they are
    given, and an object of arguments, which may be written as a string; what else it has is
    skipped."""

    def __init__(self, names: Collection[str] | None = None) -> None:
        self.ended = False
        self.is_broken = False  # it ended because it is none of calls, or none any longer
        self.has_calls = False
        self._names = names
        self._found: list[CallDelta] = []
        self._held = ""  # text that may turn out to be no call
        self._is_certain = False  # the object that is being read has a call
        self._reading = self._calls()
        next(self._reading)

    def push(self, text: str) -> tuple[list[CallDelta], str]:
        """What `text` adds, and the text behind the value; where it is none of calls, with what was
        held back of it."""
        self._found = []
        for place, letter in enumerate(text):
            if not self._is_certain:
                self._held += letter
            try:
                self._reading.send(letter)
            except StopIteration:
                self.ended = True
                return self._found, text[place + 1 :]
            except _NoCallError:
                self.ended = self.is_broken = True
                rest = letter if self._is_certain else self._held
                return self._found, rest + text[place + 1 :]
        return self._found, ""

    def finish(self) -> str:
        """The text that is no call, when no more comes."""
        is_between = self.has_calls and not self._held.strip(WHITE + ",")
        return "" if is_between else self._held

    def _calls(self) -> _Reading[None]:
        letter = yield from _token()
        if letter != "[":
            yield from self._object(letter)
            return
        while letter != "]":
            letter = yield from _token()
            yield from self._object(letter)
            letter = yield from _token()
            if letter not in ",]":
                raise _NoCallError

    def _object(self, letter: str) -> _Reading[None]:
        if letter != "{":
            raise _NoCallError
        name: str | None = None
        early: str | None = None  # arguments before the name, or in a string
        letter = yield from _token()
        while letter == '"':
            key = _decoded((yield from _value(letter))[0])
            if (yield from _token()) != ":":
                raise _NoCallError
            letter = yield from _token()
            is_arguments = key in _ARGUMENTS and early is None and not self._is_certain
            if is_arguments and letter == "{" and name is not None:
                yield from self._arguments(name)
                letter = yield from _token()
            else:
                raw, following = yield from _value(letter)
                if is_arguments and letter in '{"':
                    early = raw if letter == "{" else _decoded(raw)
                elif key == "name" and letter == '"':
                    name = self._checked(_decoded(raw))
                letter = following or (yield from _token())
            if letter == ",":
                letter = yield from _token()
            elif letter != "}":
                raise _NoCallError
        if letter != "}":
            raise _NoCallError
        if not self._is_certain:
            if name is None or early is None or not early.lstrip().startswith("{"):
                raise _NoCallError
            self._add(ArgumentsReader(name).push(early)[0])
        self._is_certain = False

    def _checked(self, name: str) -> str:
        if self._names is not None and name not in self._names:
            raise _NoCallError
        return name

    def _arguments(self, name: str) -> _Reading[None]:
        arguments = ArgumentsReader(name)
        letter = "{"
        while True:
            self._add(arguments.push(letter)[0])
            if arguments.ended:
                return
            letter = yield

    def _add(self, delta: CallDelta) -> None:
        self.has_calls = self._is_certain = True
        self._held = ""
        grow(self._found, [delta])


def _token() -> _Reading[str]:
    """The next letter that is no white space."""
    while True:
        letter = yield
        if letter not in WHITE:
            return letter


def _value(letter: str) -> _Reading[tuple[str, str]]:
    """A value that begins with `letter`, as it is written, and the letter behind it, if that had to
    be read: numbers and names end where something else begins."""
    if letter in ",:]}":
        raise _NoCallError
    raw = letter
    if letter not in '"{[':
        while True:
            letter = yield
            if letter in WHITE:
                return raw, ""
            if letter in ",]}":
                return raw, letter
            raw += letter
    end = JsonEnd()
    while not end.ends(letter):
        letter = yield
        raw += letter
    return raw, ""


def _decoded(raw: str) -> str:
    try:
        value = json.loads(raw)
        value.encode()  # half a surrogate pair is no text
    except ValueError:
        raise _NoCallError from None
    assert isinstance(value, str)
    return value

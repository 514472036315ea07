"""What a grammar may have, so that compiling it takes a second and a stack that is known.

llguidance descends by recursion: into JSON schemas and what they refer to, into rules and what they
name. A chain of some hundred definitions, which is a few kilobytes, would overrun the usual stack
and end the process.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from effinfer import _core

Result = TypeVar("Result")

# Levels of a JSON schema, those of its parts taken together. One takes up to 6 KB of stack.
_MOST_LEVELS = 16_000
# Colons of a Lark grammar: each rule has one, and takes up to 130 KB of stack, as brackets in it
# may be 30 deep.
_MOST_COLONS = 1000
_STACK_BYTES = 256 << 20  # of which only those are taken that are touched
# Signs of a regular expression or a Lark grammar that what they stand at may be left out. The time
# and memory of a row of such parts are quadratic: 8000 take a second and 300 MB.
_CHOICES = re.compile(r"[|?*{\[]")
_MOST_CHOICES = 4000
# Quadratic too: what each object of a schema adds is the square of its properties.
_MOST_SQUARES = 4000**2
# Patterns of one text that all have to hold: from a dozen on whole gigabytes.
_MOST_PATTERNS_AT_ONCE = 10
_MOST_PATTERNS_OF_NAMES = 100
_MOST_PATTERN_LETTERS = 1 << 16
# What takes a second is several times as much.
_MOST_LETTERS = {"regex": 1 << 15, "grammar": 1 << 16, "choices": 1 << 20, "json_schema": 1 << 21}

# Where other places of a text begin, by what holds their schemas.
_MAPS = ("properties", "patternProperties")
_LISTS = ("prefixItems",)
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_PLACES = ("items", "additionalProperties", "additionalItems", "contains", "propertyNames")

_starting = threading.Lock()


def check_schema(schema: Any) -> None:
    """Throws InvalidArgumentError for one that is too large or too deep."""
    height, squares, names, all_patterns, letters = 0, 0, 0, 0, 0
    references: set[str] = set()
    level = [schema]
    while level:
        height += 1
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below += value.values()
                references |= {str(value[key]) for key in _REFERENCES if key in value}
                squares += len(_dict(value.get("properties"))) ** 2
                patterns = [*_dict(value.get("patternProperties"))]
                names += len(patterns)
                all_patterns += len(patterns) + ("pattern" in value)
                letters += sum(len(text) for text in [*patterns, str(value.get("pattern", ""))])
            elif isinstance(value, list | tuple):
                below += value
        level = below
        # A chain goes through each part once.
        _check("json_schema", "levels", height * (1 + len(references)), _MOST_LEVELS)
    _check("json_schema", "squares of properties", squares, _MOST_SQUARES)
    _check("json_schema", "patterns of names", names, _MOST_PATTERNS_OF_NAMES)
    _check("json_schema", "letters of patterns", letters, _MOST_PATTERN_LETTERS)
    at_once = all_patterns
    with contextlib.suppress(RecursionError):
        if all_patterns > _MOST_PATTERNS_AT_ONCE:
            at_once = _Patterns(schema).most(schema)
    _check("json_schema", "patterns that hold at once", at_once, _MOST_PATTERNS_AT_ONCE)


class _Patterns:
    """Counts patterns that may have to hold for one text: never too few of them."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._targets: dict[str, int] = {}

    def most(self, schema: Any) -> int:
        if not isinstance(schema, dict):
            return 0
        count = int("pattern" in schema) + int("patternProperties" in schema)
        count += sum(map(self.most, _list(schema.get("allOf"))))
        count += sum(self._most_of_target(schema[key]) for key in _REFERENCES if key in schema)
        for key in ("anyOf", "oneOf"):
            count += max(map(self.most, _list(schema.get(key))), default=0)
        places = [schema.get(key) for key in _PLACES]
        for key in _MAPS:
            places += _dict(schema.get(key)).values()
        for key in _LISTS:
            places += _list(schema.get(key))
        return count + max(map(self.most, places), default=0)

    def _most_of_target(self, reference: object) -> int:
        name = str(reference)
        if name not in self._targets:
            self._targets[name] = 0  # of a circle
            self._targets[name] = self.most(self._find(name))
        return self._targets[name]

    def _find(self, name: str) -> Any:
        value = self._root
        for part in name.removeprefix("#").split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list):
                value = value[int(key)] if key.isdecimal() and int(key) < len(value) else None
            else:
                value = _dict(value).get(key)
        return value


def check_grammar(source: str) -> None:
    """Throws InvalidArgumentError for a Lark grammar that is too large."""
    _check("grammar", "colons", source.count(":"), _MOST_COLONS)
    check_choices("grammar", source)


def check_choices(field: str, source: str) -> None:
    _check(field, "of |?*{[", len(_CHOICES.findall(source)), _MOST_CHOICES)


def check_size(field: str, source: str) -> None:
    _check(field, "letters", len(source), _MOST_LETTERS[field])


def literal(text: str) -> str:
    """A regular expression of this text alone, in the library's syntax."""
    return re.sub(r"([\\.+*?()|\[\]{}^$#&\-~])", r"\\\1", text)


def on_deep_stack(call: Callable[[], Result]) -> Result:
    """What `call` returns, or throws, on a thread whose stack has room for every grammar that
    passed the checks."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="effinfer-grammar", daemon=True)
    with _starting:  # the size is of all threads that start
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        except RuntimeError:
            raise _core.Error(
                f"[grammar] no thread with a stack of {_STACK_BYTES >> 20} MB could be started"
            ) from None
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _check(field: str, what: str, count: int, most: int) -> None:
    if count > most:
        raise _core.InvalidArgumentError(
            f"[sampling] {field}: expected at most {most} {what}, got {count}"
        )

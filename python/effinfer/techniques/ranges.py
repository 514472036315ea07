"""Fields of techniques that know their ranges: wrong values are refused by name, and tests make
their wrong values from the ranges."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from effinfer import _core

MOST = 2**31 - 1


@dataclass(frozen=True)
class Range:
    """Of integers or numbers from `least`, or above `above`, to `most`; or `choices`."""

    kind: type
    least: float | None = None
    above: float | None = None
    most: float | None = None
    choices: Sequence[Any] = ()

    def contains(self, value: Any) -> bool:
        if self.choices:
            return any(value == each and type(value) is type(each) for each in self.choices)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if self.kind is int and not isinstance(value, int):
            return False
        return (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
        )

    def expected(self) -> str:
        if self.choices:
            return "one of " + ", ".join(repr(each) for each in self.choices)
        what = "an integer" if self.kind is int else "a number"
        bounds = {"of at least": self.least, "above": self.above, "of at most": self.most}
        said = [f"{how} {bound}" for how, bound in bounds.items() if bound is not None]
        return " ".join([what, ", ".join(said)])

    def check(self, owner: str, name: str, value: Any) -> None:
        if not self.contains(value):
            raise _core.InvalidArgumentError(
                f"[{owner}] {name}: expected {self.expected()}, got {value!r}"
            )

    def wrong_values(self) -> list[Any]:
        """Some of each kind."""
        wrong: list[Any] = [None, "much", math.nan, [1]]
        if self.kind is int and not self.choices:
            wrong += [0.5, True]
        wrong += [] if self.least is None else [self.least - 1]
        wrong += [] if self.above is None else [self.above]
        wrong += [] if self.most is None else [self.most + 1]
        return [value for value in wrong if not self.contains(value)]


def integer(default: int, *, least: int = 0, most: int = MOST, keyword: bool = False) -> Any:
    """A field of a dataclass; keyword: by name only, behind those of subclasses."""
    limits = {"range": Range(int, least=least, most=most)}
    return field(default=default, metadata=limits, kw_only=keyword)


def number(
    default: float,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    keyword: bool = False,
) -> Any:
    limits = {"range": Range(float, least=least, above=above, most=most)}
    return field(default=default, metadata=limits, kw_only=keyword)


def share(default: float) -> Any:
    """More than 0, at most 1."""
    return number(default, above=0.0, most=1.0)


def choice(default: Any, choices: Sequence[Any], *, keyword: bool = False) -> Any:
    limits = {"range": Range(type(default), choices=tuple(choices))}
    return field(default=default, metadata=limits, kw_only=keyword)

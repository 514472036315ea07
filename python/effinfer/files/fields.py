"""Facts of a model by their keys, from files that may hold anything."""

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from effinfer import _core

_MOST = 2**31 - 1


class Fields:
    """Reads typed values. A key that is absent or null has the default given, and without one it is
    an error. All methods throw FormatError, naming the key, for a value that is none of theirs.

    `read(key)` gives the value or None; `source` is where, for messages.
    """

    def __init__(self, read: Callable[[str], Any], source: str, prefix: str = "") -> None:
        self._read = read
        self._source = source
        self._prefix = prefix

    @classmethod
    def of(cls, values: Mapping[str, Any], source: str, prefix: str = "") -> "Fields":
        return cls(values.get, source, prefix)

    def __contains__(self, key: str) -> bool:
        return self._read(key) is not None

    def integer(
        self, key: str, default: int | None = None, *, low: int = 1, high: int = _MOST
    ) -> int:
        value = self._get(key, default)
        number = self._number(key, value)
        if not (number.is_integer() and low <= number <= high):
            self._fail(key, f"an integer in [{low}, {high}]", value)
        return int(value)

    def number(
        self,
        key: str,
        default: float | None = None,
        *,
        positive: bool = False,
        high: float = math.inf,
    ) -> float:
        """A finite number of 0 or more, or over 0 if `positive`, and at most `high`."""
        value = self._get(key, default)
        number = self._number(key, value)
        if positive and number <= 0:
            self._fail(key, "a positive number", value)
        if not 0 <= number <= high:
            self._fail(
                key,
                "a number of 0 or more" if high == math.inf else f"a number in [0, {high:g}]",
                value,
            )
        return number

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            self._fail(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            self._fail(key, "a string", value)
        return value

    def texts(self, key: str) -> list[str]:
        """A list of strings; () when absent."""
        value = self._get(key, [])
        is_list = isinstance(value, Sequence) and not isinstance(value, str)
        if not is_list or not all(isinstance(item, str) for item in value):
            self._fail(key, "a list of strings", value)
        return list(value)

    def section(self, key: str) -> dict[str, Any]:
        """An object; {} when absent."""
        value = self._get(key, {})
        if not isinstance(value, Mapping):
            self._fail(key, "an object", value)
        return dict(value)

    def _get(self, key: str, default: Any) -> Any:
        value = self._read(key)
        value = default if value is None else value
        if value is None:
            raise _core.FormatError(f"[load] {self._prefix}{key}: missing from {self._source}")
        return value

    def _number(self, key: str, value: Any) -> float:
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            self._fail(key, "a number", value)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            self._fail(key, "a finite number", value)
        return number

    def _fail(self, key: str, expected: str, value: Any) -> NoReturn:
        raise _core.FormatError(
            f"[load] {self._prefix}{key}: expected {expected}, got {_shortened(value)}"
        )


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

"""How results and remarks are printed."""

import json
import sys
from typing import Any

_printed = 0


def objects_printed() -> int:
    """By print_json, in this process."""
    return _printed


def print_json(value: Any) -> None:
    """One line on stdout."""
    global _printed
    _printed += 1
    print(json.dumps(value, ensure_ascii=False), flush=True)


class Told(Exception):
    """Ends a command whose ending was told already, with an exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Interrupted(Exception):
    """Ctrl-C, which ends the command."""


def note(text: str) -> None:
    """A line for the person at the terminal."""
    print(text, file=sys.stderr, flush=True)

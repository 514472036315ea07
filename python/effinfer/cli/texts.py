"""Texts that come from outside: files and standard input, which have to be UTF-8."""

import sys
from pathlib import Path

from effinfer import _core


def decode(data: bytes, what: str) -> str:
    """Throws FormatError that says where `data` is not UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _core.FormatError(
            f"[text] {what}: expected UTF-8 text, got byte 0x{data[error.start]:02x} at "
            f"{error.start}"
        ) from None


def read_file(path: Path) -> str:
    """Throws FileError, FormatError."""
    try:
        return decode(path.read_bytes(), str(path))
    except OSError as error:
        raise _core.FileError(f"[text] {path}: {error.strerror}") from None


def read_stdin() -> str:
    return decode(sys.stdin.buffer.read(), "standard input")


def is_piped() -> bool:
    """Whether standard input is somebody's output or a file, and not a terminal or closed."""
    return sys.stdin is not None and not sys.stdin.closed and not sys.stdin.isatty()

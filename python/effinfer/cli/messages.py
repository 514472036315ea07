"""What the library says while a command runs: log records and warnings, each a line on stderr."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from effinfer.cli.output import note

LOGGER = logging.getLogger("effinfer")


class _Lines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        note(f"effinfer: {level}{self.format(record)}")


def be_verbose(count: int) -> None:
    """-v tells what happens, -vv everything."""
    if count:
        LOGGER.setLevel(logging.DEBUG if count > 1 else logging.INFO)


def log_with_times() -> None:
    """For a command that runs for long: the log of the package, with date and time, in place of the
    lines for a person."""
    for handler in [each for each in LOGGER.handlers if isinstance(each, _Lines)]:
        LOGGER.removeHandler(handler)
    timed = logging.StreamHandler()
    timed.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    LOGGER.addHandler(timed)
    if LOGGER.level > logging.INFO:
        LOGGER.setLevel(logging.INFO)


@contextmanager
def shown_messages() -> Iterator[None]:
    """Warnings and worse of the package go to stderr; afterwards logging is as before."""
    handlers, level, propagate = LOGGER.handlers[:], LOGGER.level, LOGGER.propagate
    LOGGER.handlers[:] = [_Lines()]
    LOGGER.setLevel(logging.WARNING)
    LOGGER.propagate = False
    shown: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        text = " ".join(str(message).split())
        if text not in shown:
            shown.add(text)
            LOGGER.warning("%s", text)

    try:
        with warnings.catch_warnings():
            warnings.showwarning = show
            yield
    finally:
        LOGGER.handlers[:], LOGGER.propagate = handlers, propagate
        LOGGER.setLevel(level)

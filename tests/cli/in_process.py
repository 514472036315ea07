"""A command line run in this process: quick, and with whatever standard input."""

import contextlib
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from effinfer.cli import run


@dataclass
class Ended:
    code: int
    stdout: str
    stderr: str


def effinfer(*arguments: object, stdin: bytes = b"") -> Ended:
    return run_line([str(argument) for argument in arguments], stdin)


def run_line(arguments: Sequence[str], stdin: bytes) -> Ended:
    buffers = io.BytesIO(), io.BytesIO()
    out, err = (io.TextIOWrapper(buffer, "utf-8", "surrogateescape") for buffer in buffers)
    kept = sys.stdin
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), "utf-8", "surrogateescape")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = run(arguments)
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdin = kept
    out.flush()
    err.flush()
    texts = [buffer.getvalue().decode("utf-8", "surrogateescape") for buffer in buffers]
    return Ended(code, *texts)

"""Helpers for tests of code that runs on effinfer: every instruction-set level of the machine, and
models with random weights, and deeper twins of real ones."""

from collections.abc import Iterator
from contextlib import contextmanager

from effinfer import _core
from effinfer.checkpoints.deepened import make_twin
from effinfer.checkpoints.random_models import SHAPES, make_model

__all__ = ["SHAPES", "available_isas", "isa", "make_model", "make_twin"]


def available_isas() -> list[str]:
    """The instruction-set levels that this machine can run, lowest first: "portable", ..."""
    return list(_core.available_isas())


@contextmanager
def isa(level: str) -> Iterator[None]:
    """Caps the instruction-set level of kernels selected inside the `with` block.

    The level is process-wide, and executables choose their kernels when they are compiled: make
    them inside the block. The previous level returns at the end.

    Raises:
        InvalidArgumentError: not a level's name.
        UnsupportedError: the machine lacks the level.
    """
    previous = _core.current_isa()
    _core.set_isa(level)
    try:
        yield
    finally:
        _core.set_isa(previous)

"""How an operator becomes one of torch's: `torch.ops.effinfer.NAME`."""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from effinfer._core import InvalidArgumentError

_library = torch.library.Library("effinfer", "FRAGMENT")


class Numbers:
    """Torch operators take no objects: they name them by numbers, which graphs hold as constants.
    A module owns the object, and with it what its number means."""

    def __init__(self, argument: str, owner: str) -> None:
        """For errors: "[operator] argument", and the class of modules that give numbers."""
        self._argument = argument
        self._owner = owner
        self._objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._next = itertools.count(1)

    def add(self, thing: Any) -> int:
        number = next(self._next)
        self._objects[number] = thing
        return number

    def __getitem__(self, number: int) -> Any:
        thing = self._objects.get(number)
        if thing is None:
            raise InvalidArgumentError(
                f"{self._argument}: expected the number of a living {self._owner}, got {number}"
            )
        return thing


def register(
    schema: str, implementation: Callable[..., Any], fake: Callable[..., Any] | None
) -> None:
    """Registers an operator with torch.library.

    Args:
        schema: "name(Tensor input, float eps=1e-6) -> Tensor"; what is written to is Tensor(a!).
        implementation: takes and returns CPU tensors; gets them detached, as there are no
            gradients through effinfer.
        fake: takes the same arguments and returns empty tensors of the shapes, dtypes and strides
            of the results, for torch.compile; None for operators that return nothing.
    """
    name = schema[: schema.index("(")]

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
        return implementation(*args, **kwargs)

    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, run, "CPU")
    torch.library.register_fake(f"effinfer::{name}", fake or _nothing, lib=_library)


def _nothing(*_: Any, **__: Any) -> None:
    return None

"""A technique that shows tests a sequence between two steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from effinfer.techniques import Meta, Technique, hook


def watching(look: Callable[[Any], None], named: str = "watch", **when: Any) -> Technique:
    """Calls look(sequence) when a hook's trigger fires (`when` and its numbers)."""

    @dataclass(frozen=True)
    class Watch(Technique):
        META: ClassVar[Meta] = Meta(
            paper="a test",
            arxiv="",
            family="test.watch",
            primitives=("hooks",),
            effect="lossless",
            python_steps=True,
            name=named,
        )

        @hook(**when)
        def look(self, event: Any, sequence: Any) -> None:
            look(sequence)

    return Watch()

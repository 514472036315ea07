"""Efficient Streaming Language Models with Attention Sinks (Xiao et al., arXiv:2309.17453).

A sequence keeps the keys of its first tokens and of its last ones, at the positions that they have
in the cache (section 3.2), so that a text may be of any length:

    tokens       0 1 2 3 | 4 ... 899 | 900 901 ... 1919 | 1920
    slots        0 1 2 3 |  dropped  |   4   5 ... 1023 | next
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from effinfer import _core
from effinfer.techniques.ranges import integer
from effinfer.techniques.technique import Meta, Technique

if TYPE_CHECKING:
    from effinfer.techniques.setup import EngineSetup


@dataclass(frozen=True)
class StreamingLLM(Technique):
    """
    Args:
        sinks, recent: of the first and the last tokens, slots that stay.
        stride: slots that are dropped at a time; of 64 a page table changes and few bytes move.
        reposition: whether keys move to the positions of their slots; else they keep their own,
            and a text ends at the model's context.
        chunk_tokens: where steps of a prompt end, and keys are dropped.
    """

    META: ClassVar[Meta] = Meta(
        paper="Efficient Streaming Language Models with Attention Sinks",
        arxiv="2309.17453",
        family="kv.eviction",
        primitives=("residency", "hooks"),
        effect="approximate",
        needs=("attention",),
        exclusive=("kv.resident",),
        dense_limit={"recent": 1 << 30},
        differs="tokens are dropped between steps, some at a time, so rows of a prompt also see "
        "those of their own step; keys are rotated again where the paper caches them unrotated",
        name="streaming_llm",
    )

    sinks: int = integer(4)
    recent: int = integer(1020, least=1)
    stride: int = integer(64, least=1)
    reposition: bool = True
    chunk_tokens: int = integer(512, least=64, keyword=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recent < self.stride:
            raise _core.InvalidArgumentError(
                f"[StreamingLLM] recent: expected at least {self.stride} (stride), "
                f"got {self.recent}"
            )

    def facts(self) -> dict[str, str | int]:
        return {"chunk_tokens": self.chunk_tokens}

    def engine(self, setup: EngineSetup) -> None:
        setup.hooks.append(
            _core.keep_recent(
                sinks=self.sinks,
                recent=self.recent,
                stride=self.stride,
                reposition=self.reposition,
                technique=self.name,
            )
        )

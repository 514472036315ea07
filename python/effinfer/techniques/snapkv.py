"""SnapKV: LLM Knows What You are Looking for Before Generation (Li et al., arXiv:2404.14469).

What the last rows of a prompt attend to is what its answer will read (section 3): the keys that get
most from them stay, for each KV head its own, and all that is generated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from effinfer import _core
from effinfer.techniques.attention_mass import with_attention_mass
from effinfer.techniques.ranges import choice, integer
from effinfer.techniques.technique import Meta, Technique

if TYPE_CHECKING:
    from effinfer.techniques.setup import EngineSetup


@dataclass(frozen=True)
class SnapKV(Technique):
    """
    Args:
        budget: keys of a prompt that stay, with those of the window.
        window: last rows of the prompt that are asked, and whose keys stay.
        pool, pooling: a key counts as much as the greatest ("max") or the average ("avg") of so
            many around it, an odd number, so that details keep what stands beside them (4.2).
        chunk_tokens: where steps of a prompt end.
    """

    META: ClassVar[Meta] = Meta(
        paper="SnapKV: LLM Knows What You are Looking for Before Generation",
        arxiv="2404.14469",
        family="kv.eviction",
        primitives=("scores", "residency", "hooks"),
        effect="approximate",
        needs=("attention",),
        exclusive=("kv.resident",),
        dense_limit={"budget": 1 << 30},
        differs="query heads of a KV head are summed before they are pooled",
        name="snapkv",
    )

    budget: int = integer(1024, least=1)
    window: int = integer(32, least=1)
    pool: int = choice(7, tuple(range(1, 64, 2)))
    pooling: str = choice("max", ("max", "avg"))
    chunk_tokens: int = integer(512, least=64, keyword=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget < self.window:
            raise _core.InvalidArgumentError(
                f"[{type(self).__name__}] budget: expected at least {self.window} (window), "
                f"got {self.budget}"
            )

    def facts(self) -> dict[str, str | int]:
        return {
            "scores": "prompt",
            "score_rows": self.window,
            "chunk_tokens": self.chunk_tokens,
        }

    def graph(self, graph: _core.Graph) -> _core.Graph:
        return with_attention_mass(graph, self.name)

    def engine(self, setup: EngineSetup) -> None:
        setup.hooks.append(
            _core.keep_top(
                plane=self.name,
                count=self.budget,
                last=self.window,
                pool=self.pool,
                pooling=self.pooling,
                technique=self.name,
            )
        )

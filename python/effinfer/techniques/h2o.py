"""H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models
(Zhang et al., arXiv:2306.14048).

A few keys get most of the attention, and go on to (section 3.2): those that have had most from all
rows so far stay, and the last ones, for each KV head its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from effinfer import _core
from effinfer.techniques.attention_mass import with_attention_mass
from effinfer.techniques.ranges import choice, integer, number
from effinfer.techniques.technique import Meta, Technique

if TYPE_CHECKING:
    from effinfer.techniques.setup import EngineSetup


@dataclass(frozen=True)
class H2O(Technique):
    """
    Args:
        budget: keys that stay, with the last ones.
        recent: the last ones.
        stride: keys that are dropped at a time.
        decay: on sums for each row more, so that what few rows have wanted lately goes (A2SF,
            arXiv:2407.20485); with 0 the last row alone decides (TOVA, arXiv:2401.06104).
        reduce: "maximum": in place of sums the most that a query head of any row gave.
        chunk_tokens: where steps of a prompt end, and keys are dropped.
    """

    META: ClassVar[Meta] = Meta(
        paper="H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language "
        "Models",
        arxiv="2306.14048",
        family="kv.eviction",
        primitives=("scores", "residency", "hooks"),
        effect="approximate",
        needs=("attention",),
        exclusive=("kv.resident",),
        dense_limit={"budget": 1 << 30},
        differs="keys are dropped some at a time, within prompts too; query heads of a KV head "
        "share what they keep; its requests are not drafted for",
        name="h2o",
    )

    budget: int = integer(1024, least=1)
    recent: int = integer(512)
    stride: int = integer(64, least=1)
    decay: float = number(1.0, least=0.0, most=1.0, keyword=True)
    reduce: str = choice("sum", ("sum", "maximum"), keyword=True)
    chunk_tokens: int = integer(512, least=64, keyword=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget < self.recent + self.stride:
            raise _core.InvalidArgumentError(
                f"[{type(self).__name__}] budget: expected at least {self.recent + self.stride} "
                f"(recent and stride), got {self.budget}"
            )

    def facts(self) -> dict[str, str | int]:
        return {"scores": "both", "chunk_tokens": self.chunk_tokens}

    def graph(self, graph: _core.Graph) -> _core.Graph:
        return with_attention_mass(graph, self.name, **self.ranking())

    def ranking(self) -> dict[str, Any]:
        """Attributes of attention_mass nodes."""
        return {"reduce": self.reduce, "decay": self.decay}

    def engine(self, setup: EngineSetup) -> None:
        setup.hooks.append(
            _core.keep_top(
                plane=self.name,
                count=self.budget,
                last=self.recent,
                stride=self.stride,
                technique=self.name,
            )
        )

"""RaaS: Reasoning-Aware Attention Sparsity for Efficient LLM Reasoning
(Hu et al., arXiv:2502.11147).

A step of a long answer is read for a while, and then no more: keys that generated tokens attend to
get the time as a stamp, and those whose stamp is oldest go (section 3.2). Those of the prompt stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from effinfer import _core
from effinfer.techniques.attention_mass import with_attention_mass
from effinfer.techniques.ranges import integer, share
from effinfer.techniques.setup import hook
from effinfer.techniques.technique import Meta, Technique

STAMPS = "raas.stamps"


@dataclass(frozen=True)
class RaaS(Technique):
    """
    Args:
        budget: keys of generated tokens that stay, those of the last `stride` among them.
        stride: generated tokens from one look at their attention to the next.
        alpha: share of a token's attention, on average between two looks, that renews a stamp.
        chunk_tokens: where steps of a prompt end.
    """

    META: ClassVar[Meta] = Meta(
        paper="RaaS: Reasoning-Aware Attention Sparsity for Efficient LLM Reasoning",
        arxiv="2502.11147",
        family="kv.eviction",
        primitives=("scores", "residency", "hooks"),
        effect="approximate",
        needs=("attention",),
        exclusive=("kv.resident",),
        dense_limit={"budget": 1 << 30},
        differs="keys are stamped and dropped one by one, for each KV head, every few tokens, "
        "where the paper does it by pages in each step; its requests are not drafted for",
        python_steps=True,
        name="raas",
    )

    budget: int = integer(1024, least=1)
    stride: int = integer(16, least=1)
    alpha: float = share(0.0001)
    chunk_tokens: int = integer(512, least=64, keyword=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget < self.stride:
            raise _core.InvalidArgumentError(
                f"[RaaS] budget: expected at least {self.stride} (stride), got {self.budget}"
            )

    def facts(self) -> dict[str, str | int]:
        return {"scores": "output", "planes": STAMPS, "chunk_tokens": self.chunk_tokens}

    def graph(self, graph: _core.Graph) -> _core.Graph:
        return with_attention_mass(graph, self.name)

    @hook(when="every", tokens="stride")
    def stamp(self, _: _core.StepEvent, sequence: _core.SequenceState) -> None:
        mass, stamps = sequence.plane(self.name), sequence.plane(STAMPS)
        is_read = mass > self.alpha * self.stride
        is_read[:, -self.stride :] = True
        stamps[is_read] = sequence.next_position
        sequence.set_plane(STAMPS, stamps)
        sequence.set_plane(self.name, 0.0 * mass)
        prompt = sequence.prompt_tokens
        sequence.keep_top(STAMPS, prompt + self.budget, first=prompt, last=self.stride)

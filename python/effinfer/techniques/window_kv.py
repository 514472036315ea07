"""WindowKV: Task-Adaptive Group-Wise KV Cache Window Selection for Efficient LLM Inference
(Zuo et al., arXiv:2503.17922).

Whole spans of a prompt stay, so that what is kept can be read (section 3.2), and groups of layers
keep the same, which the first of them chooses: scoring costs one layer of each group (section 3.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from effinfer import _core
from effinfer.techniques.attention_mass import with_attention_mass
from effinfer.techniques.ranges import integer
from effinfer.techniques.setup import Hook
from effinfer.techniques.technique import Meta, Technique

if TYPE_CHECKING:
    from effinfer.techniques.setup import EngineSetup


@dataclass(frozen=True)
class WindowKV(Technique):
    """
    Args:
        budget: keys of a prompt that stay, with those of the window.
        window: last rows of the prompt that are asked, and whose keys stay.
        span: keys that stay or go together.
        group: layers, one behind the other, that keep the same.
        chunk_tokens: where steps of a prompt end.
    """

    META: ClassVar[Meta] = Meta(
        paper="WindowKV: Task-Adaptive Group-Wise KV Cache Window Selection for Efficient LLM "
        "Inference",
        arxiv="2503.17922",
        family="kv.eviction",
        primitives=("scores", "residency", "hooks"),
        effect="approximate",
        needs=("attention",),
        exclusive=("kv.resident",),
        dense_limit={"budget": 1 << 30},
        differs="no classifier tells tasks apart, and all groups of layers have one budget",
        python_steps=True,
        name="window_kv",
    )

    budget: int = integer(1024, least=1)
    window: int = integer(32, least=1)
    span: int = integer(8, least=1)
    group: int = integer(2, least=1)
    chunk_tokens: int = integer(512, least=64, keyword=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget < self.window + self.span:
            raise _core.InvalidArgumentError(
                f"[WindowKV] budget: expected at least {self.window + self.span} (window and "
                f"span), got {self.budget}"
            )

    def facts(self) -> dict[str, str | int]:
        return {
            "scores": "prompt",
            "score_rows": self.window,
            "chunk_tokens": self.chunk_tokens,
        }

    def graph(self, graph: _core.Graph) -> _core.Graph:
        return with_attention_mass(graph, self.name, every=self.group)

    def engine(self, setup: EngineSetup) -> None:
        keep = partial(self.keep, int(setup.graph.metadata["num_kv_heads"]))
        setup.hooks.append(Hook(self.name, {"prompt_end": 1}, keep))

    def keep(self, heads: int, _: _core.StepEvent, sequence: _core.SequenceState) -> None:
        """The spans of each KV head that have most; tokens before the first whole one stay."""
        import numpy as np

        size, free = sequence.length, sequence.length - self.window
        first = free % self.span
        count = max((self.budget - self.window - first) // self.span, 0)
        if size <= self.budget:
            return
        layers = sequence.plane(self.name).reshape(-1, heads, size)
        leaders = layers[:: self.group, :, first:free]
        sums = leaders.reshape(*leaders.shape[:2], -1, self.span).sum(axis=3)
        best = np.sort(np.argsort(-sums, axis=2, kind="stable")[:, :, :count], axis=2)
        slots = first + self.span * best[..., None] + np.arange(self.span)
        lists = np.repeat(slots, self.group, axis=0)[: len(layers)].reshape(len(layers) * heads, -1)
        sequence.retain([[*range(first), *each, *range(free, size)] for each in lists.tolist()])

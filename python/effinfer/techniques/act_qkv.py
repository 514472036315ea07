"""Activation-aware Probe-Query: Effective Key-Value Retrieval for Long-Context LLMs Inference (Xiao
et al., arXiv:2502.13542), what it does with generated tokens.

Pages of keys are found by the means of their keys, and layers do not get as many of them each: one
whose attention is spread over many pages gets more, and one that looks at few is cut off early, so
that all layers together visit as many as ever.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

from effinfer import _core
from effinfer.techniques.layer_density import spreads
from effinfer.techniques.rewrite import rewrite
from effinfer.techniques.sparse_decode import (
    ALWAYS,
    PAGE,
    SparseDecode,
    sparse_decode,
)
from effinfer.techniques.technique import Meta

if TYPE_CHECKING:
    from effinfer.llm import LLM

_MOST = 1 << 30  # keys of an index


@dataclass(frozen=True)
class ActQKV(SparseDecode):
    """
    Args:
        budget: keys that a generated token visits in a KV head, on average over the layers that
            choose.
        spread: how widely each layer's attention is spread, a number above 0 for each, with the
            ratios of which budgets are given: what calibrate() finds.
    """

    META: ClassVar[Meta] = sparse_decode(
        "Activation-aware Probe-Query: Effective Key-Value Retrieval for Long-Context LLMs "
        "Inference",
        "2502.13542",
        "prompts visit all keys, so that there are no probe queries of windows of theirs: a "
        "generated token asks for itself; layers' budgets are found once a model, from the entropy "
        "of attention to means on a text of one's own, not in each step; a page has the means of "
        "windows of 32 keys; the query heads of a KV head share a list",
        name="act_qkv",
    )

    spread: tuple[float, ...] = ()

    def calibrate(self, llm: LLM, text: str) -> ActQKV:
        """The same for a model, by a text of at least 256 tokens. Throws InvalidArgumentError for a
        shorter one."""
        return replace(self, spread=tuple(spreads(llm.files, llm.tokenize(text))))

    def graph(self, graph: _core.Graph) -> _core.Graph:
        layers = [node for node in graph.nodes if node["op"] == "attention"]
        if len(self.spread) != len(layers) or not all(0 < each < 1e6 for each in self.spread):
            raise _core.InvalidArgumentError(
                f"[ActQKV] spread: expected a number above 0 for each of {len(layers)} layers, as "
                f"calibrate(llm, text) returns them, got {len(self.spread)}"
            )
        chooses = [self.chooses(node) for node in layers]
        own = [each if chosen else 0.0 for each, chosen in zip(self.spread, chooses, strict=True)]
        return rewrite(graph, replace(self, spread=tuple(own)).rule())

    def budgets(self) -> list[int]:
        """Keys of whole pages that each layer chooses, none without a spread; on average as many as
        `budget` lets them choose."""
        layers = sum(each > 0 for each in self.spread)
        pages = (self.budget - ALWAYS) // PAGE * layers
        total = sum(self.spread)
        ends = [round(pages * part / total) for part in accumulate(self.spread)] if total else []
        return [
            min((end - begin) * PAGE, _MOST) for begin, end in zip([0, *ends], ends, strict=False)
        ]

    def index(self, layer: int, kv_heads: int) -> tuple[str, dict[str, Any]]:
        return "page_index", {"score": "means", "vote": "sum", "keys": self.budgets()[layer]}

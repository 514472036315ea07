"""Activation-aware Probe-Query: Effective Key-Value Retrieval for Long-Context LLMs Inference (Xiao
et al., arXiv:2502.13542).

Pages of keys are found by the means of their keys: for a generated token by its query, and for a
block of a prompt's rows by a probe query, the mean of theirs in which a token counts the more the
farther its queries lie from those of the others. A layer whose attention is spread over many pages
gets more of them, and one that looks at few is cut off early: together they visit as many as ever.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from effinfer import _core
from effinfer.techniques.layer_density import shared_pages, spreads
from effinfer.techniques.prefill import CHUNK_TOKENS, visits_can_be_chosen
from effinfer.techniques.ranges import integer
from effinfer.techniques.rewrite import rewrite
from effinfer.techniques.sparse_decode import (
    ALWAYS,
    PAGE,
    SparseDecode,
    shared_facts,
    sparse_decode,
)
from effinfer.techniques.technique import Meta

if TYPE_CHECKING:
    from effinfer.graph import GraphBuilder, Value
    from effinfer.llm import LLM

# The page before a block's own is visited in any case, as of generated tokens.
_PROBE = {"queries": "probe", "sink_tokens": PAGE, "local_tokens": PAGE + 1}
_MOST = 1 << 30  # keys of an index


@dataclass(frozen=True)
class ActQKV(SparseDecode):
    """
    Args:
        budget: keys that a generated token, and a block of a prompt's rows, visits in a KV head, on
            average over the layers that choose.
        spread: how widely each layer's attention is spread, a number above 0 for each, with the
            ratios of which budgets are given: what calibrate() finds.
    """

    META: ClassVar[Meta] = sparse_decode(
        "Activation-aware Probe-Query: Effective Key-Value Retrieval for Long-Context LLMs "
        "Inference",
        "2502.13542",
        "a probe query is of a block of 64 rows, and a token's weight of the query heads of a KV "
        "head, which share a list; layers' budgets are found once a model, from the entropy of "
        "attention to means on a text of one's own, not in each step, and hold in prompts, too; "
        "pages of 64 keys: a prompt's rows ask for their means, a generated token for those of "
        "windows of 32",
        name="act_qkv",
        in_prompts=True,
    )

    spread: tuple[float, ...] = ()
    chunk_tokens: int = integer(CHUNK_TOKENS, least=64, keyword=True)

    def calibrate(self, llm: LLM, text: str) -> ActQKV:
        """For a model, by a text of its kind. Throws InvalidArgumentError below 256 tokens."""
        return replace(self, spread=tuple(spreads(llm.files, llm.tokenize(text))))

    def graph(self, graph: _core.Graph) -> _core.Graph:
        layers = [node for node in graph.nodes if node["op"] == "attention"]
        if len(self.spread) != len(layers) or not all(0 < each < 1e6 for each in self.spread):
            raise _core.InvalidArgumentError(
                f"[ActQKV] spread: expected a number above 0 for each of {len(layers)} layers, as "
                f"calibrate(llm, text) returns them, got {len(self.spread)}"
            )
        own = [s if self.chooses(n) else 0.0 for s, n in zip(self.spread, layers, strict=True)]
        shared = replace(self, spread=tuple(own))
        return rewrite(rewrite(graph, shared.in_prompts), shared.rule())

    def facts(self) -> dict[str, str | int]:
        return {**super().facts(), "chooses": "both", "chunk_tokens": self.chunk_tokens}

    def in_prompts(
        self, builder: GraphBuilder, node: dict[str, Any], inputs: list[Value]
    ) -> Value | None:
        """What becomes of a node for a prompt's rows."""
        if not visits_can_be_chosen(node) or not self.chooses(node):
            return None
        keys = self.budgets()[node["attributes"]["layer"]]
        options = {"keys": keys, "share": self.share, "min_tokens": self.min_tokens, **_PROBE}
        visits = builder.node("block_index", *inputs, **shared_facts(node), **options)
        return builder.node("attention", *inputs, visits, **node["attributes"])

    def budgets(self) -> list[int]:
        """Keys of whole pages that layers choose, `budget` on average; none without a spread."""
        pages = shared_pages((self.budget - ALWAYS) // PAGE, self.spread)
        return [min(each * PAGE, _MOST) for each in pages]

    def index(self, layer: int, kv_heads: int) -> tuple[str, dict[str, Any]]:
        return "page_index", {"score": "means", "vote": "sum", "keys": self.budgets()[layer]}

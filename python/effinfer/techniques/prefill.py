"""What sparse prefills have in common: attention visits only keys that a method chooses.

In every step of a prompt, a method looks at the step's queries and at the keys so far, and chooses
for each block of up to 64 query rows and each KV head which keys they visit. Attention then costs
what is visited. Layers with a sliding window, generated tokens and short sequences stay exact. What
is chosen depends on how a prompt is cut into steps, so these end at multiples of chunk_tokens.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from effinfer import _core
from effinfer.graph import GraphBuilder, Value
from effinfer.techniques.ranges import integer
from effinfer.techniques.rewrite import rewrite
from effinfer.techniques.technique import Meta, Technique

CHUNK_TOKENS = 2048  # each step pays for choosing once

# Attributes of an attention node that its indices have too.
_SHARED = ("layer", "heads", "kv_heads", "head_dim", "sm_scale")


def visits_can_be_chosen(node: dict[str, Any]) -> bool:
    """Whether a node is attention to all keys: without a window, and nothing has chosen yet."""
    return (
        node["op"] == "attention"
        and node["attributes"]["window_left"] < 0
        and len(node["inputs"]) == 2
    )


def free_heads(graph: _core.Graph) -> set[tuple[int, int]]:
    """(layer, KV head) of those that visits_can_be_chosen() for."""
    shapes = (n["attributes"] for n in filter(visits_can_be_chosen, graph.nodes))
    return {(shape["layer"], head) for shape in shapes for head in range(shape["kv_heads"])}


def sparse_prefill(paper: str, arxiv: str, differs: str, **facts: Any) -> Meta:
    """The META of one."""
    return Meta(
        paper=paper,
        arxiv=arxiv,
        family="prefill.sparse",
        primitives=("visits",),
        effect="approximate",
        needs=("attention",),
        exclusive=("prefill.visits",),
        probe="facts",
        differs=differs,
        **facts,
    )


@dataclass(frozen=True)
class SparsePrefill(Technique, ABC):
    """A method that chooses keys. Immutable: one object serves many models."""

    META: ClassVar[Meta] = sparse_prefill("a method of one's own", "", "")

    chunk_tokens: int = integer(CHUNK_TOKENS, least=64, keyword=True)

    @abstractmethod
    def indices(self, layer: int, kv_heads: int) -> list[tuple[str, dict[str, Any]]]:
        """The nodes that choose a layer's keys: pairs of an operator, `column_index`,
        `block_index` or `bucket_index`, and its attributes (docs/graph_ops.md)."""

    def graph(self, graph: _core.Graph) -> _core.Graph:
        """The graph with the method before every attention that has no window."""
        return rewrite(graph, self._visit)

    def facts(self) -> dict[str, str | int]:
        return {
            "chooses": "prompt",
            "min_tokens": int(getattr(self, "min_tokens", 0)),
            "chunk_tokens": self.chunk_tokens,
        }

    def _visit(
        self, builder: GraphBuilder, node: dict[str, Any], inputs: list[Value]
    ) -> Value | None:
        if not visits_can_be_chosen(node):
            return None
        visits = self.visits(builder, node, inputs)
        return builder.node("attention", *inputs, visits, **node["attributes"])

    def visits(self, builder: GraphBuilder, node: dict[str, Any], inputs: list[Value]) -> Value:
        """Of an attention node: what its rows visit, in nodes before it."""
        shared = {key: node["attributes"][key] for key in _SHARED}
        visits: list[Value] = []
        for op, options in self.indices(shared["layer"], shared["kv_heads"]):
            visits = [builder.node(op, *inputs, *visits, **shared, **options)]
        return visits[0]

"""MLKV: Multi-Layer Key-Value Heads for Memory Efficient Transformer Decoding
(Zuhri et al., arXiv:2406.09297).

Groups of layers share the keys and values that the first of them makes (section 3), so that a cache
has as many layers as there are groups. For models that were trained so: what the other layers' own
projections would make, if there are some, nobody reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from effinfer import _core
from effinfer.techniques.layers import num_layers
from effinfer.techniques.rewrite import prune, rewrite
from effinfer.techniques.technique import Meta

if TYPE_CHECKING:
    from effinfer.graph import GraphBuilder, Value


@dataclass(frozen=True)
class MLKV:
    """`LLM(model, layers=MLKV(4))`: a fourth of the keys and values.

    Args:
        group: layers, one behind the other, that share keys and values.
    """

    META: ClassVar[Meta] = Meta(
        paper="MLKV: Multi-Layer Key-Value Heads for Memory Efficient Transformer Decoding",
        arxiv="2406.09297",
        family="kv.sharing",
        primitives=("graph",),
        effect="trained",
        needs=("attention",),
        differs="graphs of the usual architectures, whose layers have one window or none",
        name="mlkv",
    )

    group: int

    def apply(self, graph: _core.Graph) -> _core.Graph:
        """Throws InvalidArgumentError for a group below 1, UnsupportedError for a model whose
        layers have other windows than each other."""
        if self.group < 1:
            raise _core.InvalidArgumentError(
                f"[MLKV] group: expected at least 1, got {self.group!r}"
            )
        windows = {
            node["attributes"]["window_left"] for node in graph.nodes if node["op"] == "attention"
        }
        if len(windows) != 1:
            raise _core.UnsupportedError(
                f"[MLKV] {graph.name}: expected layers of one window, got {sorted(windows)}"
            )
        shared: dict[int, Value] = {}  # what a group's layers attend to

        def share(builder: GraphBuilder, node: dict[str, Any], inputs: list[Value]) -> Value | None:
            facts = dict(node["attributes"])
            if "layer" not in facts:
                return None
            group, place = divmod(facts["layer"], self.group)
            facts["layer"] = group
            if node["op"] != "kv_append":
                return builder.node(node["op"], inputs[0], shared[group], *inputs[2:], **facts)
            if place == 0:
                shared[group] = builder.node("kv_append", *inputs, **facts)
            return shared[group]

        count = -(-num_layers(graph) // self.group)
        return prune(rewrite(graph, share, {"num_layers": count}))

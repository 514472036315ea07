"""What sparse prefills have in common: attention visits only keys that a method chooses.

In every step of a prompt, a method looks at the step's queries and at the keys so far, and chooses
for each block of up to 64 query rows and each KV head which keys they visit. Attention then costs
what is visited. Layers with a sliding window, generated tokens and short sequences stay exact. What
is chosen, and with it the result, depends on how a prompt was cut into steps.
"""

from abc import ABC, abstractmethod
from typing import Any

from effinfer import _core
from effinfer.graph import GraphBuilder, Value
from effinfer.techniques.rewrite import rewrite

# Attributes of an attention node that its indices have too.
_SHARED = ("layer", "heads", "kv_heads", "head_dim", "sm_scale")


def visits_can_be_chosen(node: dict[str, Any]) -> bool:
    """Whether a node is attention to all keys: without a window, and nothing has chosen yet."""
    return (
        node["op"] == "attention"
        and node["attributes"]["window_left"] < 0
        and len(node["inputs"]) == 2
    )


class SparsePrefill(ABC):
    """A method that chooses keys. Immutable: one object serves many models."""

    @abstractmethod
    def indices(self, layer: int, kv_heads: int) -> list[tuple[str, dict[str, Any]]]:
        """The nodes that choose a layer's keys: pairs of an operator, `column_index` or
        `block_index`, and its attributes (docs/graph_ops.md)."""

    def apply(self, graph: _core.Graph) -> _core.Graph:
        """The graph with the method before every attention that has no window."""
        return rewrite(graph, self._visit)

    def _visit(
        self, builder: GraphBuilder, node: dict[str, Any], inputs: list[Value]
    ) -> Value | None:
        attributes = node["attributes"]
        if not visits_can_be_chosen(node):
            return None
        shared = {key: attributes[key] for key in _SHARED}
        visits: list[Value] = []
        for op, options in self.indices(shared["layer"], shared["kv_heads"]):
            visits = [builder.node(op, *inputs, *visits, **shared, **options)]
        return builder.node("attention", *inputs, *visits, **attributes)

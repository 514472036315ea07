"""EasySpec: Layer-Parallel Speculative Decoding for Efficient Multi-GPU Utilization (Wu et al.
2025, arXiv:2502.02493): in the draft model, the attention of several layers in a row reads one and
the same input, so that nothing keeps it from running at once. Drafts get a little worse, texts stay
what they are.

The paper runs a group's attention on several GPUs and repairs the draft's cache with an exact pass
after each round. Here layers still take turns, since one set of threads computes each of them
already, and the draft's cache keeps what the drafting wrote: what is kept of the method is the
approximation, and its acceptance can be measured.
"""

from dataclasses import dataclass
from typing import Any

from effinfer import _core
from effinfer.graph import GraphBuilder, Value
from effinfer.techniques.layers import additions, num_layers
from effinfer.techniques.rewrite import rewrite


@dataclass(frozen=True)
class EasySpec:
    """What `DraftModel(model, layers=EasySpec())` does to the draft model.

    Args:
        group: layers in a row whose attention reads what the first of them reads.
        first: layers at the beginning that stay as they are; they change the stream most.
    """

    group: int = 2
    first: int = 1

    def apply(self, graph: _core.Graph) -> _core.Graph:
        """Throws InvalidArgumentError for sizes that the model does not have."""
        count = num_layers(graph)
        for name, value, least in (("group", self.group, 1), ("first", self.first, 1)):
            if type(value) is not int or not least <= value <= count:
                raise _core.InvalidArgumentError(
                    f"[EasySpec] {name}: expected {least}..{count}, got {value!r}"
                )
        behind = {a.layer: a.result for a in additions(graph)}
        adding = {a.result for a in additions(graph)}
        # The stream before a layer -> the stream before the group's first layer.
        shared = {}
        for layer in range(self.first, count):
            start = layer - (layer - self.first) % self.group
            if start != layer:
                shared[behind[layer - 1]] = behind[start - 1]
        seen: dict[str, Value] = {}

        def read_earlier(
            builder: GraphBuilder, node: dict[str, Any], inputs: list[Value]
        ) -> Value | None:
            seen.update(zip(node["inputs"], inputs, strict=True))
            (result,) = node["outputs"]
            if result in adding or not shared.keys() & set(node["inputs"]):
                return None
            inputs = [seen[shared.get(name, name)] for name in node["inputs"]]
            return builder.node(node["op"], *inputs, **node["attributes"])

        return rewrite(graph, read_earlier)

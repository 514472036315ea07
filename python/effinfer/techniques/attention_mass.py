"""What methods have in common that keep keys by how much attention they get: the model's graph adds
the probabilities of some rows, summed over the query heads of a KV head, to a plane of the sequence
that has the method's name, and a hook keeps the slots that have most."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

from effinfer.techniques.rewrite import rewrite

if TYPE_CHECKING:
    from effinfer import _core
    from effinfer.graph import GraphBuilder, Value

# Attributes of an attention node that attention_mass has too.
_SHARED = ("layer", "heads", "kv_heads", "head_dim", "sm_scale")


def with_attention_mass(
    graph: _core.Graph,
    plane: str,
    every: int = 1,
    temperature: float = 1.0,
    noise: float = 0.0,
    **rule: Any,
) -> _core.Graph:
    """A graph whose attention to all keys is summed up, in one of `every` so many layers, the first
    included; layers with a window drop their keys anyway. What is summed are probabilities of
    logits with `noise` times the noise of the technique's facts, divided by a temperature; `rule`
    is the node's `reduce` and `decay`."""
    layers = count()

    def add(builder: GraphBuilder, node: dict[str, Any], inputs: list[Value]) -> Value | None:
        facts = node["attributes"]
        sees_all = node["op"] == "attention" and facts["window_left"] < 0
        if sees_all and next(layers) % every == 0:
            shared = {key: facts[key] for key in _SHARED}
            shared["sm_scale"] /= temperature
            if noise:
                shared["noise"] = noise / temperature
            builder.node("attention_mass", *inputs[:2], **shared, plane=plane, **rule)
        return None

    return rewrite(graph, add)

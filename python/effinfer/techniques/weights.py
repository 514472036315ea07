"""What methods have in common whose keys stand for several: a plane of the sequence has the
logarithm of how many each slot stands for, and attention counts it as often."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from effinfer.techniques.rewrite import rewrite

if TYPE_CHECKING:
    from effinfer import _core
    from effinfer.graph import GraphBuilder, Value


def with_weights(graph: _core.Graph, plane: str) -> _core.Graph:
    """A graph whose attention to all keys counts them by a plane, e to the power of its numbers;
    layers with a window keep their keys as they are."""

    def weigh(builder: GraphBuilder, node: dict[str, Any], inputs: list[Value]) -> Value | None:
        facts = node["attributes"]
        if node["op"] != "attention" or facts["window_left"] >= 0:
            return None
        return builder.node("attention", *inputs, **{**facts, "weights": plane})

    return rewrite(graph, weigh)

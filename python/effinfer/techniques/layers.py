"""A model's layers in its graph: which nodes add to the residual stream, and graphs without some.

A layer adds to the stream: `x = x + attention(norm(x))`, `x = x + mlp(norm(x))`. Leaving a layer
out leaves out its additions, and then nothing reads what they were made of.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from effinfer import _core
from effinfer.graph import GraphBuilder, Value
from effinfer.techniques.rewrite import prune, rewrite

_BLOCK = re.compile(r"blk\.(\d+)\.")


@dataclass(frozen=True)
class Addition:
    """A node that adds what a layer has made to the stream."""

    result: str  # the stream behind it
    stream: int  # which of its inputs is the stream before it
    layer: int


def layer_numbers(graph: _core.Graph) -> dict[str, int]:
    """Of each value that a node makes the layer whose weights or cache it depends on; -1: none."""
    weights = {name: facts["weight_name"] for name, facts in graph.values.items()}
    layers: dict[str, int] = {}
    for node in graph.nodes:
        (result,) = node["outputs"]
        named = (_BLOCK.match(weights[name]) for name in node["inputs"])
        layers[result] = max(
            node["attributes"].get("layer", -1),
            *(int(match[1]) for match in named if match),
            *(layers.get(name, -1) for name in node["inputs"]),
            -1,
        )
    return layers


def additions(graph: _core.Graph) -> list[Addition]:
    """In order. Throws UnsupportedError for a graph without a residual stream."""
    layers = layer_numbers(graph)
    found: list[Addition] = []
    stream = None
    for node in graph.nodes:
        (result,) = node["outputs"]
        if node["op"] == "embedding":
            stream = result
        elif node["op"] == "add" and stream in node["inputs"]:
            place = node["inputs"].index(stream)
            layer = layers[node["inputs"][1 - place]]
            found.append(Addition(result, place, layer))
            stream = result
    if not found or found[-1].layer < 0:
        raise _core.UnsupportedError(f"[layers] {graph.name}: expected layers that add to a stream")
    return found


def num_layers(graph: _core.Graph) -> int:
    return max(addition.layer for addition in additions(graph)) + 1


def without_layers(graph: _core.Graph, skipped: Collection[int]) -> _core.Graph:
    """The model without these layers. Layers keep their numbers, so that they may read a cache that
    the whole model wrote. Throws InvalidArgumentError for a layer that it lacks."""
    known = additions(graph)
    count = num_layers(graph)
    for layer in skipped:
        if layer not in range(count):
            raise _core.InvalidArgumentError(
                f"[layers] expected layers of 0..{count - 1}, got {layer}"
            )
    left_out = {a.result: a.stream for a in known if a.layer in set(skipped)}

    def leave_out(_: GraphBuilder, node: dict[str, Any], inputs: list[Value]) -> Value | None:
        (result,) = node["outputs"]
        return inputs[left_out[result]] if result in left_out else None

    return prune(rewrite(graph, leave_out))


def with_hidden_states(graph: _core.Graph, layers: Collection[int]) -> _core.Graph:
    """The model that also returns the stream behind these layers, f32[T, hidden], as "hidden.N"."""
    behind = {a.layer: a.result for a in additions(graph)}
    try:
        return prune(graph, {behind[layer]: f"hidden.{layer}" for layer in layers})
    except KeyError as error:
        raise _core.InvalidArgumentError(
            f"[layers] expected layers of 0..{max(behind)}, got {error}"
        ) from None

"""Rewriting a model's graph before it is compiled: what techniques that change a model do."""

from collections.abc import Callable
from typing import Any

from effinfer import _core
from effinfer.graph import GraphBuilder, Value

# rule(builder, node, inputs) emits what stands for a node, a dict of op, inputs, outputs and
# attributes, and returns its result; None keeps the node as it is.
Rule = Callable[[GraphBuilder, dict[str, Any], list[Value]], Value | None]


def rewrite(graph: _core.Graph, rule: Rule) -> _core.Graph:
    """A copy of a graph in which `rule` has had its say about every node. The graph is one that a
    model definition writes: its nodes have one result each."""
    builder = GraphBuilder(graph.name)
    for key, value in graph.metadata.items():
        builder.set_metadata(key, value)
    made = {name for node in graph.nodes for name in node["outputs"]}
    values: dict[str, Value] = {}
    for name, facts in graph.values.items():
        if name in made:
            continue
        if facts["weight_name"]:
            values[name] = builder.weight(facts["weight_name"], facts["dtype"], facts["shape"])
        else:
            values[name] = builder.input(name, facts["dtype"], facts["shape"])
    for node in graph.nodes:
        inputs = [values[name] for name in node["inputs"]]
        result = rule(builder, node, inputs)
        if result is None:
            result = builder.node(node["op"], *inputs, **node["attributes"])
        (output,) = node["outputs"]
        values[output] = result
    return builder.finish(*(values[name] for name in graph.outputs))

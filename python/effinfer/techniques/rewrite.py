"""Rewriting a model's graph before it is compiled: what techniques that change a model do."""

from collections.abc import Callable, Mapping
from typing import Any

from effinfer import _core
from effinfer.graph import GraphBuilder, Value

# rule(builder, node, inputs) emits what stands for a node, a dict of op, inputs, outputs and
# attributes, and returns its result; None keeps the node as it is.
Rule = Callable[[GraphBuilder, dict[str, Any], list[Value]], Value | None]


def rewrite(
    graph: _core.Graph, rule: Rule, metadata: Mapping[str, Any] | None = None
) -> _core.Graph:
    """A copy of a graph in which `rule` has had its say about every node, with more metadata. The
    graph is one that a model definition writes: its nodes have one result each."""
    builder = GraphBuilder(graph.name)
    for key, value in {**graph.metadata, **(metadata or {})}.items():
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


def with_metadata(graph: _core.Graph, entries: Mapping[str, Any]) -> _core.Graph:
    """A copy with these entries in its metadata, beside or in place of its own."""
    return rewrite(graph, lambda _builder, _node, _inputs: None, entries)


def prune(graph: _core.Graph, names: Mapping[str, str] | None = None) -> _core.Graph:
    """The part of a graph that its outputs need, and other values that it shall return, `names`: a
    name for each of them."""
    wanted = [*graph.outputs, *(names or {})]
    needed, nodes = set(wanted), []
    for node in reversed(graph.nodes):
        if needed.intersection(node["outputs"]):
            needed.update(node["inputs"])
            nodes.append(node)
    builder = GraphBuilder(graph.name)
    for key, value in graph.metadata.items():
        builder.set_metadata(key, value)
    values: dict[str, Value] = {}
    made = {name for node in graph.nodes for name in node["outputs"]}
    for name, facts in graph.values.items():
        if name not in needed or name in made:
            continue
        if facts["weight_name"]:
            values[name] = builder.weight(facts["weight_name"], facts["dtype"], facts["shape"])
        else:
            values[name] = builder.input(name, facts["dtype"], facts["shape"])
    for node in reversed(nodes):
        inputs = [values[name] for name in node["inputs"]]
        (output,) = node["outputs"]
        values[output] = builder.node(node["op"], *inputs, **node["attributes"])
    for value, name in (names or {}).items():
        builder.rename(values[value], name)
    return builder.finish(*(values[name] for name in wanted))

"""MInference's search for the pattern of each head (section 3.2 of its paper, algorithm 1): the one
whose result is nearest to that of all keys, on a text of one's own.

All patterns read the queries and keys of the dense model. The paper compares patterns of equal
cost; here they compete with the budgets that their methods have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from effinfer import _core
from effinfer.techniques.graph_steps import GraphSteps
from effinfer.techniques.prefill import SparsePrefill, visits_can_be_chosen
from effinfer.techniques.rewrite import prune, rewrite

if TYPE_CHECKING:
    from effinfer.checkpoints.model_files import ModelFiles
    from effinfer.graph import GraphBuilder, Value

Head = tuple[int, int]  # layer, KV head

LEAST_TOKENS = 1024
_STEP = 512  # tokens whose results are compared: the text's last ones


def nearest_patterns(
    methods: Mapping[str, SparsePrefill], files: ModelFiles, ids: Sequence[int]
) -> dict[Head, str]:
    """Of `methods`, one a pattern, the name of the nearest for each head; the first among equals.
    Throws InvalidArgumentError for a text of fewer than LEAST_TOKENS."""
    if len(ids) < LEAST_TOKENS:
        raise _core.InvalidArgumentError(
            f"[MInference] text: expected at least {LEAST_TOKENS} tokens, got {len(ids)}"
        )
    graphs = {pattern: _with_both(files.graph, method) for pattern, method in methods.items()}
    steps = GraphSteps.of(files, next(iter(graphs.values())), len(ids))
    text = steps.begin()
    steps.feed(text, ids[:-_STEP])
    errors = {}
    for pattern, graph in graphs.items():
        executable = steps.beside(graph)
        steps.feed(text, ids[-_STEP:], executable=executable)
        steps.drop(text, _STEP)
        errors[pattern] = _errors(executable, files.graph)
    heads = next(iter(errors.values()))
    return {head: min(errors, key=lambda name: errors[name][head]) for head in heads}


def _with_both(graph: _core.Graph, method: SparsePrefill) -> _core.Graph:
    """The dense graph that also returns what the attention of each layer without a window gives,
    "dense.N", and what it would give with the method, "sparse.N": f32 [T, heads * head_dim]."""
    layers: list[int] = []

    def attend(builder: GraphBuilder, node: dict[str, Any], inputs: list[Value]) -> Value | None:
        if not visits_can_be_chosen(node):
            return None
        layer = node["attributes"]["layer"]
        dense = builder.node("attention", *inputs, **node["attributes"])
        sparse = builder.node(
            "attention", *inputs, method.visits(builder, node, inputs), **node["attributes"]
        )
        for value, name in ((dense, "all"), (sparse, "some")):
            builder.rename(value, f"keys.{name}.{layer}")
        layers.append(layer)
        return dense

    both = rewrite(graph, attend)
    names = {"all": "dense", "some": "sparse"}
    return prune(both, {f"keys.{k}.{n}": f"{v}.{n}" for n in layers for k, v in names.items()})


def _errors(executable: _core.Executable, graph: _core.Graph) -> dict[Head, float]:
    """Of each head in the last step: the squares of what the chosen keys lack."""
    errors: dict[Head, float] = {}
    for node in filter(visits_can_be_chosen, graph.nodes):
        layer, heads = node["attributes"]["layer"], node["attributes"]["kv_heads"]
        lacks = executable.output(f"dense.{layer}") - executable.output(f"sparse.{layer}")
        squares = (lacks.reshape(len(lacks), heads, -1) ** 2).sum(axis=(0, 2))
        errors.update({(layer, head): float(squares[head]) for head in range(heads)})
    return errors

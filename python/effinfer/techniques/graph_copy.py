"""Parts of a model's graph in a graph of their own: its first layers, one of its layers again with
other weights, what follows a layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from effinfer import _core
from effinfer.graph import GraphBuilder, Value
from effinfer.techniques.layers import additions, layer_numbers
from effinfer.techniques.rewrite import prune
from effinfer.techniques.vocab_trim import find_head

if TYPE_CHECKING:
    from effinfer.checkpoints.model_files import ModelFiles


class GraphCopy:
    """A graph under construction. `known`: what stands for values of the model, by their names.

    Throws UnsupportedError for a model without a residual stream.
    """

    def __init__(self, target: ModelFiles, weights: _core.WeightSource, name: str) -> None:
        self.graph, self.ops, self._weights = target.graph, GraphBuilder(name), weights
        for key, value in self.graph.metadata.items():
            self.ops.set_metadata(key, value)
        self.known: dict[str, Value] = {}
        self._made: dict[str, Value] = {}  # inputs
        made = {name for node in self.graph.nodes for name in node["outputs"]}
        self._inputs = set(self.graph.values) - made
        self._numbers = layer_numbers(self.graph)
        added = additions(self.graph)
        first = next(n for n in self.graph.nodes if n["outputs"][0] == added[0].result)
        self.streams = [first["inputs"][added[0].stream]]  # before each layer, and behind the last
        for addition, after in zip(added, [*added[1:], None], strict=True):
            if after is None or after.layer != addition.layer:
                self.streams.append(addition.result)
        self.halves = {a.layer: a.result for a in reversed(added)}  # behind a layer's attention

    def weight(self, name: str) -> Value:
        return self.ops.weight(name, self._weights.dtype(name), self._weights.shape(name))

    def linear(self, x: Value, name: str) -> Value:
        return self.ops.linear(x, self.weight(name))

    def norm_like(self, x: Value, stream: str, name: str) -> Value:
        """The norm that follows a stream of the model, with another weight."""
        for node in self.graph.nodes:
            if node["op"] == "rms_norm" and node["inputs"][0] == stream:
                return self.ops.node("rms_norm", x, self.weight(name), **node["attributes"])
        raise _core.UnsupportedError(f"[layers] {self.graph.name}: expected an rms_norm of layers")

    def take(self, name: str) -> Value:
        """A value of the model, with all that it needs of it."""
        return self._copy(name, self.known, {})

    def layer(
        self,
        number: int,
        x: Value,
        *,
        prefix: str = "",
        cache: int | None = None,
        window: int = -1,
        until: str = "",
        known: Mapping[str, Value] | None = None,
    ) -> Value:
        """A layer of the model on another stream; until: a value of it in place of its result.

        prefix: of its weights' names, in place of blk.N; cache: the layer of the cache that it
        writes and reads; window: keys before a row that it sees, -1: as the model's; known: values
        of it that it does not compute."""
        outside = {name: v for name, v in self.known.items() if self._numbers.get(name) != number}
        inner = {**outside, self.streams[number]: x, **(known or {})}
        renamed = {f"blk.{number}.": f"{prefix}."} if prefix else {}
        changed = {} if cache is None else {"layer": cache}
        changed |= {} if window < 0 else {"window_left": window}
        return self._copy(until or self.streams[number + 1], inner, renamed, changed)

    def caches(self, number: int) -> list[str]:
        """What a layer appends to the cache."""
        return [
            node["outputs"][0]
            for node in self.graph.nodes
            if node["op"] == "kv_append" and node["attributes"]["layer"] == number
        ]

    def finish(self, x: Value, own_norm: str = "") -> _core.Graph:
        """The logits of the model's head on a stream; own_norm: a weight for its last norm."""
        last = find_head(self.graph)["inputs"][0]
        node = next(n for n in self.graph.nodes if n["outputs"][0] == last)
        names = [self.graph.values[name]["weight_name"] for name in node["inputs"]]
        renamed = {name: own_norm for name in names if name and own_norm}
        rest = {self.streams[-1]: x, **{n: v for n, v in self.known.items() if n in self._inputs}}
        return prune(self.ops.finish(self._copy(self.graph.outputs[0], rest, renamed)))

    def _copy(
        self,
        wanted: str,
        known: dict[str, Value],
        renamed: Mapping[str, str],
        changed: Mapping[str, int] | None = None,
    ) -> Value:
        needed, nodes = {wanted} - set(known), []
        for node in reversed(self.graph.nodes):
            if needed.intersection(node["outputs"]):
                needed.update(name for name in node["inputs"] if name not in known)
                nodes.append(node)
        for name in needed & self._inputs:
            known[name] = self._input(name, renamed)
        for node in reversed(nodes):
            attributes = dict(node["attributes"])
            attributes |= {k: v for k, v in (changed or {}).items() if k in attributes}
            inputs = [known[name] for name in node["inputs"]]
            known[node["outputs"][0]] = self.ops.node(node["op"], *inputs, **attributes)
        return known[wanted]

    def _input(self, name: str, renamed: Mapping[str, str]) -> Value:
        facts = self.graph.values[name]
        weight = facts["weight_name"]
        if not weight:
            return self.input(name, facts["dtype"], facts["shape"])
        for old, new in renamed.items():
            weight = weight.replace(old, new) if weight.startswith(old) else weight
        return self.weight(weight)

    def input(self, name: str, dtype: str, shape: Sequence[int | str]) -> Value:
        if name not in self._made:
            self._made[name] = self.ops.input(name, dtype, shape)
        return self._made[name]

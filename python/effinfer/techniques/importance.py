"""What tells a model's heads from one state near its input which keys they will attend to: a small
trained predictor in the model's graph. The keys that it makes for several layers lie beside each
other in one layer more of the cache, `channels` of each:

    layers   first  first + 1  first + 2  first + 3 | first + 4 ...
    layer of the cache           30                 |     31
    channels 0..15  16..31     32..47     48..63    |   0..15   ...

A file of it has the metadata of TrainedParts, heads.first and heads.channels, and the weights
token_butler.X.weight: norm [hidden], query and key [rank, hidden], and of each layer more of the
cache N.queries [heads * head_dim, rank] and N.keys [kv_heads * head_dim, rank].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from effinfer import _core
from effinfer.techniques.layers import additions, num_layers
from effinfer.techniques.sparse_decode import SparseDecode, visits_all

if TYPE_CHECKING:
    from effinfer.graph import GraphBuilder, Value

KIND = "token_butler"
_CHANNELS = (4, 8, 16, 32, 64)


class ImportancePredictor:
    """Its nodes, and the lists that a method makes of them, in a graph that is written anew."""

    def __init__(self, path: str, graph: _core.Graph, method: SparseDecode) -> None:
        self.method, self.path, self.file = method, path, _core.GgufFile(path)
        self.layers = num_layers(graph)
        head_dim = next(
            node["attributes"]["head_dim"] for node in graph.nodes if node["op"] == "attention"
        )
        self.first = self._fact("first", [*range(1, self.layers)])
        self.channels = self._fact("channels", [n for n in _CHANNELS if head_dim % n == 0])
        self.stream = [a.result for a in additions(graph) if a.layer < self.first][-1]
        self.states: list[Value] = []  # of which queries and keys are made
        self.lists: list[Value] = []  # of each layer that visits chosen keys
        self.labels: dict[int, tuple[Value, Value]] = {}  # of each layer more of the cache

    def visit(
        self, builder: GraphBuilder, node: dict[str, Any], inputs: list[Value]
    ) -> Value | None:
        facts = node["attributes"]
        if node["op"] == "rms_norm" and node["inputs"][0] == self.stream:
            x = builder.node("rms_norm", inputs[0], self._weight(builder, "norm"), **facts)
            for part in ("query", "key"):
                state = builder.linear(x, self._weight(builder, part))
                self.states.append(builder.node("silu", state))
        if not visits_all(node) or facts["layer"] < max(self.first, self.method.skip_layers):
            return None
        shared = {key: facts[key] for key in ("layer", "heads", "kv_heads")}
        if len(self.lists) % self.method.reuse_layers:
            self.lists.append(builder.node("copy_index", self.lists[-1], *inputs[2:], **shared))
            return builder.node("attention", *inputs[:2], self.lists[-1], **facts)
        more, place = divmod(facts["layer"] - self.first, facts["head_dim"] // self.channels)
        channels = [place * self.channels + i for i in range(self.channels)] * facts["kv_heads"]
        op, chosen = self.method.choice(node)
        chosen |= {"layer": self.layers + more, "channels": channels}
        labels = self._labels(builder, more, facts)
        self.lists.append(builder.node(op, *labels, *inputs[2:], **chosen))
        return builder.node("attention", *inputs[:2], self.lists[-1], **facts)

    def _labels(
        self, builder: GraphBuilder, more: int, facts: dict[str, Any]
    ) -> tuple[Value, Value]:
        if more not in self.labels:
            query, key = self.states
            queries = builder.linear(query, self._weight(builder, f"{more}.queries"))
            keys = builder.linear(key, self._weight(builder, f"{more}.keys"))
            shape = {"heads": facts["kv_heads"], "head_dim": facts["head_dim"]}
            handle = builder.node("kv_append", keys, keys, layer=self.layers + more, **shape)
            self.labels[more] = queries, handle
        return self.labels[more]

    def _fact(self, key: str, allowed: list[int]) -> int:
        value = self.file.get(f"heads.{key}")
        if value not in allowed:
            raise _core.InvalidArgumentError(
                f"[heads] {self.path}: expected {key} of {allowed[0]}..{allowed[-1]} that suits "
                f"the model, got {value}"
            )
        return int(value)

    def _weight(self, builder: GraphBuilder, name: str) -> Value:
        full = f"{KIND}.{name}.weight"
        return builder.weight(full, self.file.dtype(full), self.file.shape(full))

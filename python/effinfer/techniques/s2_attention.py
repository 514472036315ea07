"""S2-Attention: Hardware-Aware Context Sharding Among Attention Heads (Lin et al.,
arXiv:2407.17678).

Each head reads a shard of what lies far back, every so many blocks of keys, and all heads the
nearest blocks. Shards of neighbouring heads follow each other, so that together they hold the whole
context, and since a block's number alone decides, a generated token reads as few keys as a row of a
prompt. Some layers see all keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from effinfer import _core
from effinfer.graph import GraphBuilder, Value
from effinfer.techniques.prefill import SparsePrefill
from effinfer.techniques.ranges import integer
from effinfer.techniques.technique import Meta


@dataclass(frozen=True)
class S2Attention(SparsePrefill):
    """
    Args:
        stride: of so many pages of 64 keys a KV head visits one.
        local_tokens: keys before a row's own page that it visits, in whole pages, at least one.
        sink_tokens: first keys that all heads visit; models that were not trained with the pattern
            need a few.
        dense_layers: that see all keys, by number.
        min_tokens: rows behind fewer keys visit all of them.

    Throws InvalidArgumentError.
    """

    META: ClassVar[Meta] = Meta(
        paper="S2-Attention: Hardware-Aware Context Sharding Among Attention Heads",
        arxiv="2407.17678",
        family="attention.pattern",
        primitives=("visits",),
        effect="trained",
        needs=("attention",),
        exclusive=("prefill.visits", "decode.visits"),
        dense_limit={"stride": 1},
        probe="facts",
        differs="shards are of KV heads, and go on with the next layer's; first keys for models "
        "that were not trained with the pattern; keys that no head visits stay in the cache",
        name="s2_attention",
    )

    stride: int = integer(8, least=1)
    local_tokens: int = integer(512)
    sink_tokens: int = integer(4)
    dense_layers: Sequence[int] = (0, 1)
    min_tokens: int = integer(0)

    def graph(self, graph: _core.Graph) -> _core.Graph:
        known = {n["attributes"]["layer"] for n in graph.nodes if n["op"] == "attention"}
        if not isinstance(self.dense_layers, Sequence) or not known.issuperset(self.dense_layers):
            raise _core.InvalidArgumentError(
                f"[S2Attention] dense_layers: expected numbers of layers, 0 to {max(known)}, "
                f"got {self.dense_layers!r}"
            )
        return super().graph(graph)

    def facts(self) -> dict[str, str | int]:
        return {**super().facts(), "chooses": "both"}

    def _visit(
        self, builder: GraphBuilder, node: dict[str, Any], inputs: list[Value]
    ) -> Value | None:
        if node["attributes"].get("layer") in self.dense_layers:
            return None
        return super()._visit(builder, node, inputs)

    def indices(self, layer: int, kv_heads: int) -> list[tuple[str, dict[str, Any]]]:
        options = {
            "stride": self.stride,
            "shift": layer * kv_heads % self.stride,
            "local_tokens": self.local_tokens,
            "sink_tokens": self.sink_tokens,
            "min_tokens": self.min_tokens,
        }
        return [("strided_index", options)]

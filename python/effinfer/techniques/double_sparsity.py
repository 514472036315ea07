"""Post-Training Sparse Attention with Double Sparsity (Yang et al., arXiv:2408.07092).

A few channels of a head tell which keys have high logits. Which ones is found once a model, on a
text of one's own; a generated token then multiplies these alone with all keys, and visits the keys
whose products are highest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from effinfer import _core
from effinfer.techniques.key_channels import strongest_channels
from effinfer.techniques.ranges import integer
from effinfer.techniques.sparse_decode import SparseDecode, sparse_decode
from effinfer.techniques.technique import Meta

if TYPE_CHECKING:
    from effinfer.llm import LLM


@dataclass(frozen=True)
class DoubleSparsity(SparseDecode):
    """
    Args:
        channels: of each KV head that count, an even number.
        labels: which these are, ascending, of each KV head of each layer: what calibrate() finds.
    """

    META: ClassVar[Meta] = sparse_decode(
        "Post-Training Sparse Attention with Double Sparsity",
        "2408.07092",
        "channels are pairs of neighbours, read out of the keys where they lie, in place of a "
        "cache of labels in 4 bits; a channel counts by the spread of its products over keys; "
        "the query heads of a KV head share a list",
    )

    channels: int = integer(16, least=2)
    labels: tuple[int, ...] = ()

    def calibrate(self, llm: LLM, text: str) -> DoubleSparsity:
        """The same with the labels of a model, from a text of at least 256 tokens. Throws
        InvalidArgumentError for a shorter one, or where a head has fewer channels."""
        found = strongest_channels(llm.files, llm.tokenize(text), self.channels)
        return replace(self, labels=tuple(found))

    def graph(self, graph: _core.Graph) -> _core.Graph:
        layers = [node["attributes"] for node in graph.nodes if node["op"] == "attention"]
        heads = sum(each["kv_heads"] for each in layers)
        if len(self.labels) != heads * self.channels:
            raise _core.InvalidArgumentError(
                f"[DoubleSparsity] labels: expected {self.channels} of each of {heads} KV heads, "
                f"as calibrate(llm, text) returns them, got {len(self.labels)}"
            )
        return super().graph(graph)

    def index(self, layer: int, kv_heads: int) -> tuple[str, dict[str, Any]]:
        size = kv_heads * self.channels
        return "key_index", {"channels": list(self.labels[layer * size :][:size])}

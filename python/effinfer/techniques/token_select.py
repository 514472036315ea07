"""TokenSelect: Efficient Long-Context Inference and Length Extrapolation for LLMs via Dynamic
Token-Level KV Cache Selection (Wu et al., arXiv:2411.02886).

Keys that matter to a token lie scattered, so single ones are chosen, by their own logits. Heads
vote: after each one's softmax over the keys a key has the sum of what they give it.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from effinfer.techniques.sparse_decode import SparseDecode, sparse_decode
from effinfer.techniques.technique import Meta


@dataclass(frozen=True)
class TokenSelect(SparseDecode):
    """With the fields of SparseDecode."""

    META: ClassVar[Meta] = sparse_decode(
        "TokenSelect: Efficient Long-Context Inference and Length Extrapolation for LLMs via "
        "Dynamic Token-Level KV Cache Selection",
        "2411.02886",
        "the query heads of a KV head vote, not those of a layer; every token chooses: a choice is "
        "not reused while queries are similar; the first page of 64 keys and the two newest are "
        "visited in any case",
    )

    def index(self, layer: int, kv_heads: int) -> tuple[str, dict[str, Any]]:
        return "key_index", {"vote": "sum"}

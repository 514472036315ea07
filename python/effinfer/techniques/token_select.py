"""TokenSelect: Efficient Long-Context Inference and Length Extrapolation for LLMs via Dynamic
Token-Level KV Cache Selection (Wu et al., arXiv:2411.02886).

Keys that matter to a token lie scattered, so single ones are chosen, by their own logits. Heads
vote: after each one's softmax over the keys a key has the sum of what they give it. Queries of
tokens that follow each other are alike, so that what one has chosen serves others, too.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from effinfer.techniques.ranges import number
from effinfer.techniques.sparse_decode import SparseDecode, sparse_decode
from effinfer.techniques.technique import Meta


@dataclass(frozen=True)
class TokenSelect(SparseDecode):
    """
    Args:
        reuse: above 0, a token visits what one before it has chosen while their queries have a
            cosine above this. Its requests are not drafted for.
    """

    META: ClassVar[Meta] = sparse_decode(
        "TokenSelect: Efficient Long-Context Inference and Length Extrapolation for LLMs via "
        "Dynamic Token-Level KV Cache Selection",
        "2411.02886",
        "the query heads of a KV head vote and compare queries, not those of a layer; a choice is "
        "not reused unless asked for, and on another page of 64 keys a token chooses anew; the "
        "first page and the two newest are visited in any case",
    )

    reuse: float = number(0.0, least=0.0, most=1.0)

    def index(self, layer: int, kv_heads: int) -> tuple[str, dict[str, Any]]:
        kept = {"reuse": self.reuse, "plane": self.name} if self.reuse else {}
        return "key_index", {"vote": "sum", **kept}

    def facts(self) -> dict[str, str | int]:
        # Rows of its output are kept in a plane of its name.
        kept: dict[str, str | int] = {"scores": "output", "chunk_tokens": 2048}
        return {**super().facts(), **(kept if self.reuse else {})}

"""Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference (Tang et al.,
arXiv:2406.10774).

What a generated token attends to is next to nothing for most keys. The least and the greatest of
neighbouring keys in each dimension bound how high a query's logits may be among them (section 3.3),
and a row visits the units with the highest bounds.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from effinfer.techniques.ranges import choice
from effinfer.techniques.sparse_decode import SparseDecode, sparse_decode
from effinfer.techniques.technique import Meta


@dataclass(frozen=True)
class Quest(SparseDecode):
    """
    Args:
        unit: keys that have bounds together and are visited together, 16, 32 or 64. Bounds of 16
            take four times the memory of those of 64. GPUs have those of 64.
    """

    META: ClassVar[Meta] = sparse_decode(
        "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference",
        "2406.10774",
        "units of 64 keys by default, not 16; the query heads of a KV head share a list; the first "
        "page of 64 keys and the two newest are visited in any case; bounds are bfloat16, rounded "
        "outwards",
    )

    unit: int = choice(64, (16, 32, 64))

    def index(self, layer: int, kv_heads: int) -> tuple[str, dict[str, Any]]:
        return "page_index", {"unit": self.unit}

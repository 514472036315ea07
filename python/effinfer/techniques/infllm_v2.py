"""InfLLM-V2: Dense-Sparse Switchable Attention for Seamless Short-to-Long Adaptation (Zhao et al.,
arXiv:2509.24663), the attention of MiniCPM4 (arXiv:2506.07900) behind long texts.

Windows of 32 keys, one every 16, have the mean of their keys. What a window's mean gets of the
queries' attention, added up over the query heads of a KV head, says how much a block of 64 keys may
matter: as much as the window that matters most of those that share keys with it. The first block
and a window of the newest keys are visited in any case.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from effinfer import _core
from effinfer.techniques.ranges import integer
from effinfer.techniques.sparse_decode import PAGE, SparseDecode, sparse_decode
from effinfer.techniques.technique import Meta


@dataclass(frozen=True)
class InfLLMV2(SparseDecode):
    """
    Args:
        local: the newest keys, which are visited in any case; of the budget.
    """

    META: ClassVar[Meta] = sparse_decode(
        "InfLLM-V2: Dense-Sparse Switchable Attention for Seamless Short-to-Long Adaptation",
        "2509.24663",
        "generated tokens choose, and prompts visit all keys; windows that reach into the first or "
        "the newest blocks have no part in the softmax; the first two layers visit all keys unless "
        "skip_layers says otherwise; models that were not trained for it may try it, too",
        effect="trained",
        name="infllm_v2",
    )

    budget: int = integer(4096, least=3 * PAGE)
    local: int = integer(2048, least=PAGE)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.budget < self.local + 2 * PAGE:
            raise _core.InvalidArgumentError(
                f"[{type(self).__name__}] budget: expected at least {self.local + 2 * PAGE} (local "
                f"and two blocks), got {self.budget}"
            )

    def index(self, layer: int, kv_heads: int) -> tuple[str, dict[str, Any]]:
        return "page_index", {
            "score": "means",
            "vote": "sum",
            "local_tokens": self.local,
            "keys": self.budget - PAGE - self.local,
        }

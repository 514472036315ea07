"""SampleAttention: Near-Lossless Acceleration of Long Context LLM Inference with Adaptive
Structured Sparse Attention (Zhu et al., arXiv:2406.15486).

Rows in even strides are attended in full. The columns that hold a share of their probability, as
few as do, and a window around the diagonal are what all rows visit (section 4.2).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from effinfer.techniques.prefill import SparsePrefill, sparse_prefill
from effinfer.techniques.ranges import integer, share
from effinfer.techniques.technique import Meta


@dataclass(frozen=True)
class SampleAttention(SparsePrefill):
    """
    Args:
        sample_ratio: the share of a step's rows that are asked.
        mass: the share of their probability that the columns hold; how many these are adapts to
            head and prompt.
        local_tokens: keys before each row that it visits in any case.
        sink_tokens: first keys that all rows visit in any case.
        min_tokens: a shorter prompt is attended to in full, and so is a step in which choosing
            would cost more than it is likely to save; 0: keys are chosen in any case.

    Throws InvalidArgumentError.
    """

    META: ClassVar[Meta] = sparse_prefill(
        "SampleAttention: Near-Lossless Acceleration of Long Context LLM Inference with Adaptive "
        "Structured Sparse Attention",
        "2406.15486",
        "the window is a number of keys, where the paper has a share of the prompt",
        dense_limit={"local_tokens": 1 << 30},
        name="sample_attention",
    )

    sample_ratio: float = share(0.05)
    mass: float = share(0.95)
    local_tokens: int = integer(512)
    sink_tokens: int = integer(4)
    min_tokens: int = integer(2048)

    def indices(self, layer: int, kv_heads: int) -> list[tuple[str, dict[str, Any]]]:
        options = {
            "row_stride": round(1 / self.sample_ratio),
            "column_mass": self.mass,
            "sink_tokens": self.sink_tokens,
            "local_tokens": self.local_tokens,
            "min_tokens": self.min_tokens,
        }
        return [("column_index", options)]

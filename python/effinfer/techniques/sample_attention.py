"""SampleAttention: Near-Lossless Acceleration of Long Context LLM Inference with Adaptive
Structured Sparse Attention (Zhu et al., arXiv:2406.15486).

Rows in even strides are attended in full. The columns that hold a share of their probability, as
few as do, and a window around the diagonal are what all rows visit (section 4.2).
"""

from dataclasses import dataclass
from typing import Any

from effinfer import _core
from effinfer.techniques.prefill import SparsePrefill


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

    sample_ratio: float = 0.05
    mass: float = 0.95
    local_tokens: int = 512
    sink_tokens: int = 4
    min_tokens: int = 2048

    def __post_init__(self) -> None:
        for name in ("sample_ratio", "mass"):
            share = getattr(self, name)
            if not 0 < share <= 1:
                raise _core.InvalidArgumentError(
                    f"[SampleAttention] {name}: expected more than 0, at most 1, got {share}"
                )

    def indices(self, layer: int, kv_heads: int) -> list[tuple[str, dict[str, Any]]]:
        options = {
            "row_stride": round(1 / self.sample_ratio),
            "column_mass": self.mass,
            "sink_tokens": self.sink_tokens,
            "local_tokens": self.local_tokens,
            "min_tokens": self.min_tokens,
        }
        return [("column_index", options)]

"""MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic Sparse Attention
(Jiang et al., arXiv:2407.02490).

Every attention head has one of three patterns. Which one is a property of the model; the keys
themselves are estimated from each prompt.

    A-shape          the first keys and the nearest ones; nothing is estimated (section 3.2)
    vertical-slash   keys and distances that the last rows of a step attend to (algorithm 2)
    block-sparse     blocks of 64 keys by the products of mean queries and keys (algorithm 3)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from effinfer import _core
from effinfer.techniques.prefill import SparsePrefill, visits_can_be_chosen

PATTERNS = ("a_shape", "vertical_slash", "block_sparse")


@dataclass(frozen=True)
class MInference(SparsePrefill):
    """
    Args:
        pattern: of the heads that `patterns` does not name.
        patterns: by (layer, KV head): the query heads of a KV head share its list.
        vertical_size, slash_size: keys, and distances between row and key, that each query head
            visits in the vertical-slash pattern; last_rows of a step are asked for them.
        num_blocks: blocks of 64 keys that a block of rows visits in the block-sparse pattern.
        a_shape_sink_tokens, a_shape_local_tokens: keys of the A-shape pattern.
        sink_tokens, local_tokens: keys that the other two visit in any case.
        min_tokens: a shorter prompt is attended to in full, and so is a step in which choosing
            would cost more than it is likely to save; 0: keys are chosen in any case.

    Throws InvalidArgumentError for an unknown pattern, and for a head in `patterns` that a model
    lacks or that has a window.
    """

    pattern: str = "vertical_slash"
    patterns: Mapping[tuple[int, int], str] = field(default_factory=dict)
    vertical_size: int = 256
    slash_size: int = 256
    last_rows: int = 64
    num_blocks: int = 16
    a_shape_sink_tokens: int = 128
    a_shape_local_tokens: int = 1024
    sink_tokens: int = 30
    local_tokens: int = 100
    min_tokens: int = 2048

    def __post_init__(self) -> None:
        for pattern in (self.pattern, *self.patterns.values()):
            if pattern not in PATTERNS:
                raise _core.InvalidArgumentError(
                    f"[MInference] pattern: expected {', '.join(PATTERNS)}, got {pattern!r}"
                )

    def apply(self, graph: _core.Graph) -> _core.Graph:
        heads = {
            (node["attributes"]["layer"], head)
            for node in graph.nodes
            if visits_can_be_chosen(node)
            for head in range(node["attributes"]["kv_heads"])
        }
        for named in self.patterns:
            if named not in heads:
                raise _core.InvalidArgumentError(
                    f"[MInference] patterns: expected (layer, KV head) of {graph.name}'s attention "
                    f"without a window, got {named}"
                )
        return super().apply(graph)

    def indices(self, layer: int, kv_heads: int) -> list[tuple[str, dict[str, Any]]]:
        heads: dict[str, list[int]] = {}
        for head in range(kv_heads):
            heads.setdefault(self.patterns.get((layer, head), self.pattern), []).append(head)
        return [self._index(pattern, only) for pattern, only in heads.items()]

    def _index(self, pattern: str, only: list[int]) -> tuple[str, dict[str, Any]]:
        options: dict[str, Any] = {"only": only, "min_tokens": self.min_tokens}
        if pattern == "a_shape":
            options |= {
                "sink_tokens": self.a_shape_sink_tokens,
                "local_tokens": self.a_shape_local_tokens,
            }
            return "column_index", options
        options |= {"sink_tokens": self.sink_tokens, "local_tokens": self.local_tokens}
        if pattern == "block_sparse":
            return "block_index", options | {"pages": self.num_blocks}
        return "column_index", options | {
            "columns": self.vertical_size,
            "slashes": self.slash_size,
            "last_rows": self.last_rows,
        }

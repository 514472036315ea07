"""MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic Sparse Attention
(Jiang et al., arXiv:2407.02490).

Every attention head has one of three patterns. Which one is a property of the model; the keys
themselves are estimated from each prompt.

    A-shape          the first keys and the nearest ones; nothing is estimated (section 3.2)
    vertical-slash   keys and distances that the last rows of a step attend to (algorithm 2)
    block-sparse     blocks of 64 keys by the products of mean queries and keys (algorithm 3)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from effinfer import _core
from effinfer.techniques.pattern_search import nearest_patterns
from effinfer.techniques.prefill import SparsePrefill, free_heads, sparse_prefill
from effinfer.techniques.ranges import Range, choice, integer
from effinfer.techniques.technique import Meta

if TYPE_CHECKING:
    from effinfer.llm import LLM

PATTERNS = ("a_shape", "vertical_slash", "block_sparse")


@dataclass(frozen=True)
class MInference(SparsePrefill):
    """
    Args:
        pattern: of the heads that `patterns`, by (layer, KV head), does not name; search() does.
        vertical_size, slash_size: keys, and distances between row and key, that each query head
            visits in the vertical-slash pattern; last_rows of a step are asked for them.
        num_blocks: blocks of 64 keys that a block of rows visits in the block-sparse pattern.
        a_shape_sink_tokens, a_shape_local_tokens: keys of the A-shape pattern.
        sink_tokens, local_tokens: keys that the other two visit in any case.
        min_tokens: shorter prompts, and steps where choosing does not pay, see all keys; 0: none.
    """

    META: ClassVar[Meta] = sparse_prefill(
        "MInference 1.0: Accelerating Pre-filling for Long-Context LLMs via Dynamic Sparse "
        "Attention",
        "2407.02490",
        "patterns are of KV heads, whose query heads share a list",
        dense_limit={"vertical_size": 1 << 30},
        name="minference",
    )

    pattern: str = choice("vertical_slash", PATTERNS)
    patterns: Mapping[tuple[int, int], str] = field(default_factory=dict)
    vertical_size: int = integer(256)
    slash_size: int = integer(256)
    last_rows: int = integer(64, least=1)
    num_blocks: int = integer(16)
    a_shape_sink_tokens: int = integer(128)
    a_shape_local_tokens: int = integer(1024)
    sink_tokens: int = integer(30)
    local_tokens: int = integer(100)
    min_tokens: int = integer(2048)

    def __post_init__(self) -> None:
        super().__post_init__()
        for pattern in self.patterns.values():
            Range(str, choices=PATTERNS).check("MInference", "patterns", pattern)

    def search(self, llm: LLM, text: str) -> MInference:
        """The same with the pattern of each head that is nearest to dense attention on a text of at
        least 1,024 tokens. Throws InvalidArgumentError for a shorter one."""
        own = replace(self, patterns={}, min_tokens=0)
        methods = {p: replace(own, pattern=p) for p in (self.pattern, *PATTERNS)}
        return replace(self, patterns=nearest_patterns(methods, llm.files, llm.tokenize(text)))

    def graph(self, graph: _core.Graph) -> _core.Graph:
        for named in set(self.patterns) - free_heads(graph):
            raise _core.InvalidArgumentError(
                f"[MInference] patterns: expected (layer, KV head) of {graph.name}'s attention "
                f"without a window, got {named}"
            )
        return super().graph(graph)

    def indices(self, layer: int, kv_heads: int) -> list[tuple[str, dict[str, Any]]]:
        heads: dict[str, list[int]] = {}
        for head in range(kv_heads):
            heads.setdefault(self.patterns.get((layer, head), self.pattern), []).append(head)
        return [self._index(pattern, only) for pattern, only in heads.items()]

    def _index(self, pattern: str, only: list[int]) -> tuple[str, dict[str, Any]]:
        options: dict[str, Any] = {"only": only, "min_tokens": self.min_tokens}
        if pattern == "a_shape":
            options["sink_tokens"] = self.a_shape_sink_tokens
            return "column_index", options | {"local_tokens": self.a_shape_local_tokens}
        options |= {"sink_tokens": self.sink_tokens, "local_tokens": self.local_tokens}
        if pattern == "block_sparse":
            return "block_index", options | {"pages": self.num_blocks}
        sizes = {"columns": self.vertical_size, "slashes": self.slash_size}
        return "column_index", options | sizes | {"last_rows": self.last_rows}

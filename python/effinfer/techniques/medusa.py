"""Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads (Cai et al.
2024, arXiv:2401.10774): heads on the last hidden state, each for a token further ahead.
"""

from dataclasses import dataclass
from typing import ClassVar

from effinfer.graph import Value
from effinfer.techniques.heads import HeadGraph, Heads


@dataclass(frozen=True)
class Medusa(Heads):
    """
    The paper's heads are h + silu(W h) with a square W and an output matrix each. Here W has a low
    rank, U silu(D h), and all heads share the model's own output matrix, cut to frequent tokens.
    Trees grow by what heads believe, level by level, where the paper has one fixed tree.
    """

    kind: ClassVar[str] = "medusa"

    def hands_on(self, _depth: int) -> bool:
        return False

    def build_head(self, graph: HeadGraph, depth: int) -> Value:
        down = graph.ops.silu(graph.linear(graph.hidden, f"medusa.{depth}.down.weight"))
        return graph.ops.add(graph.hidden, graph.linear(down, f"medusa.{depth}.up.weight"))

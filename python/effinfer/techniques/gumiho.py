"""Gumiho: A Hybrid Architecture to Prioritize Early Tokens in Speculative Decoding (Li et al. 2025,
arXiv:2503.10135): the first drafted tokens matter most, so the first heads are serial and larger;
those behind them work in parallel on what the serial ones made.
"""

from dataclasses import dataclass
from typing import ClassVar

from effinfer.graph import Value
from effinfer.techniques.heads import HeadGraph, Heads

SERIAL = 2  # heads that read a token each


@dataclass(frozen=True)
class Gumiho(Heads):
    """
    The paper's serial part is a transformer of two layers. Here it is two heads as `Hydra` has
    them, and the parallel ones are as `Medusa` has them, of a lower rank. Trees grow by what heads
    believe.
    """

    kind: ClassVar[str] = "gumiho"

    def hands_on(self, depth: int) -> bool:
        return depth < SERIAL

    def build_head(self, graph: HeadGraph, depth: int) -> Value:
        ops, name = graph.ops, f"gumiho.{depth}"
        read = graph.linear(graph.hidden, f"{name}.down.weight")
        if depth < SERIAL:
            read = ops.add(read, graph.linear(graph.embedded, f"{name}.token.weight"))
        return ops.add(graph.hidden, graph.linear(ops.silu(read), f"{name}.up.weight"))

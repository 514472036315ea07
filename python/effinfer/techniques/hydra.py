"""Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding (Ankner et al. 2024,
arXiv:2402.05109): a head also reads the tokens that were drafted before its own.
"""

from dataclasses import dataclass
from typing import ClassVar

from effinfer.graph import Value
from effinfer.techniques.heads import HeadGraph, Heads


@dataclass(frozen=True)
class Hydra(Heads):
    """
    The paper's head i reads the hidden state and the embeddings of all i tokens behind it. Here it
    reads the state that head i - 1 made, which has seen the tokens before, and the embedding of the
    last: s + U silu(D s + E embedding), of a low rank, on the model's own output matrix, cut.
    """

    kind: ClassVar[str] = "hydra"

    def build_head(self, graph: HeadGraph, depth: int) -> Value:
        ops, name = graph.ops, f"hydra.{depth}"
        read = graph.linear(graph.hidden, f"{name}.down.weight")
        token = graph.linear(graph.embedded, f"{name}.token.weight")
        up = graph.linear(ops.silu(ops.add(read, token)), f"{name}.up.weight")
        return ops.add(graph.hidden, up)

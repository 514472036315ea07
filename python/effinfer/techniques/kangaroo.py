"""Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting (Liu et al. 2024,
arXiv:2404.18911): the model's first layers draft, with a trained adapter between them and the
model's head, and a draft ends early where it is unsure.
"""

from dataclasses import dataclass
from typing import ClassVar

from effinfer.graph import Value
from effinfer.techniques.graph_copy import GraphCopy
from effinfer.techniques.trained_exit import TrainedExit


@dataclass(frozen=True)
class Kangaroo(TrainedExit):
    """`LLM(target, draft_model=Kangaroo("kangaroo.gguf"))`.

    As in the paper the adapter is one attention of the model's shape and two norms, without an MLP.
    The paper's draft shares the cache of the layers that it runs, so that the target runs the rest
    of them only; here the target runs all its layers, and the draft has pages of its own. It ends
    by what a level is worth in measured time (`adaptive`), where the paper has a threshold.
    """

    kind: ClassVar[str] = "kangaroo"

    def leave(self, copy: GraphCopy, exit_layer: int) -> Value:
        x = copy.take(copy.streams[exit_layer])
        last = len(copy.streams) - 2
        return copy.layer(last, x, prefix=self.kind, cache=exit_layer, until=copy.halves[last])

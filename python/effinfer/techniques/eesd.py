"""EESD: Speculative Decoding via Early-exiting for Faster LLM Inference with Thompson Sampling
Control Mechanism (Liu et al. 2024, arXiv:2406.03853): the first layers and one trained decoder
layer draft, and Thompson sampling says when a draft ends.
"""

from dataclasses import dataclass
from typing import ClassVar

from effinfer.checkpoints.model_files import ModelFiles
from effinfer.graph import Value
from effinfer.speculation import Speculation
from effinfer.techniques.graph_copy import GraphCopy
from effinfer.techniques.thompson import ThompsonLength
from effinfer.techniques.trained_exit import TrainedExit


@dataclass(frozen=True)
class _ExitLayer(TrainedExit):
    kind: ClassVar[str] = "eesd"

    def leave(self, copy: GraphCopy, exit_layer: int) -> Value:
        x = copy.take(copy.streams[exit_layer])
        return copy.layer(len(copy.streams) - 2, x, prefix=self.kind, cache=exit_layer)


@dataclass(frozen=True)
class EESD(_ExitLayer):
    """`LLM(target, draft_model=EESD("eesd.gguf"))`.

    The paper's Beta-TS, a draw for each drafted token; its Calibration-TS, which also asks how sure
    the draft is, is not here. The layer learns the target's distributions by the recipe, on a
    corpus in place of texts that the model wrote.
    """

    def speculation(self, target: ModelFiles) -> Speculation:
        draft = _ExitLayer(**{**vars(self), "adaptive": False, "width": 1})
        return Speculation([draft.for_target(target)], controller=ThompsonLength(self.length))

"""Accelerating Inference in Large Language Models with a Unified Layer Skipping Strategy (Liu et
al. 2024, arXiv:2404.06954): a wanted speed alone decides how many layers run, and those that do not
are spread evenly, so that every token of every text costs the same.

The paper fine-tunes the model for it. Without that, a text loses what the layers gave: lossy, and
only a few layers can go.
"""

from dataclasses import dataclass

from effinfer import _core
from effinfer.techniques.layers import num_layers, without_layers


@dataclass(frozen=True)
class UnifiedSkip:
    """`LLM(model, layers=UnifiedSkip(1.2))`, or layers that a `DraftModel` runs.

    Args:
        speedup: of the layers, 1 or more: 1 / speedup of them run, two at least.
    """

    speedup: float

    def skipped(self, count: int) -> list[int]:
        """What a model of `count` layers leaves out; never its first layer, nor its last."""
        if not self.speedup >= 1:
            raise _core.InvalidArgumentError(
                f"[UnifiedSkip] speedup: expected 1 or more, got {self.speedup!r}"
            )
        kept = max(round(count / self.speedup), min(count, 2))
        if kept == 1:
            return list(range(1, count))
        running = {round(i * (count - 1) / (kept - 1)) for i in range(kept)}
        return [layer for layer in range(count) if layer not in running]

    def apply(self, graph: _core.Graph) -> _core.Graph:
        return without_layers(graph, self.skipped(num_layers(graph)))

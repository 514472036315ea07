"""Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding
(Zhang et al. 2024, arXiv:2309.08168): the model drafts without some of its layers.

LayerSkip (Elhoushi et al. 2024, arXiv:2404.16710) leaves early: all layers behind one are skipped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from effinfer import _core
from effinfer.techniques.layers import num_layers, without_layers


@dataclass(frozen=True)
class SkipLayers:
    """
    Args:
        layers: what the draft leaves out, by number from 0.

    The papers train the model for it, or search for the layers that matter least.
    """

    layers: Sequence[int]

    def apply(self, graph: _core.Graph) -> _core.Graph:
        return without_layers(graph, self.layers)


@dataclass(frozen=True)
class EarlyExit:
    """
    Args:
        layer: the first that the draft leaves out, with all behind it.
    """

    layer: int

    def apply(self, graph: _core.Graph) -> _core.Graph:
        count = num_layers(graph)
        if self.layer not in range(1, count):
            raise _core.InvalidArgumentError(
                f"[EarlyExit] layer: expected 1..{count - 1}, got {self.layer}"
            )
        return without_layers(graph, range(self.layer, count))

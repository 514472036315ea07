"""TokenButler: Token Importance is Predictable (Akhauri et al., arXiv:2503.07518).

A small predictor reads the stream before a layer near the model's input, once a token, and makes
short queries and keys for every head of the layers behind it (section 3). Their products say which
keys a generated token is likely to attend to.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from effinfer import _core
from effinfer.techniques.importance import KIND, ImportancePredictor
from effinfer.techniques.rewrite import rewrite
from effinfer.techniques.sparse_decode import SparseDecode, sparse_decode
from effinfer.techniques.technique import Meta
from effinfer.techniques.trained_parts import TrainedParts

if TYPE_CHECKING:
    from effinfer.checkpoints.model_files import ModelFiles


@dataclass(frozen=True)
class TokenButler(SparseDecode):
    """
    Args:
        path: the file of a predictor that was trained for the model; examples/selectors has the
            recipe.
    """

    META: ClassVar[Meta] = replace(
        sparse_decode(
            "TokenButler: Token Importance is Predictable",
            "2503.07518",
            "no attention within the predictor, which learns the distribution of attention over "
            "the keys that are chosen from, not its logits; products without rotation; the query "
            "heads of a KV head share a list; what the predictor makes of a token takes layers of "
            "the cache, whose values nobody reads",
        ),
        primitives=("visits", "graph"),
        needs=("attention", "predictor"),
        exclusive=("decode.visits", "kv.resident"),
    )

    path: str = ""

    def extend(self, target: ModelFiles) -> ModelFiles:
        """The model with the predictor's weights. Throws what TrainedParts throws."""
        parts = TrainedParts(self._file(), KIND, target)
        return replace(target, weights=parts.beside(target.weights))

    def graph(self, graph: _core.Graph) -> _core.Graph:
        return rewrite(graph, ImportancePredictor(self._file(), graph, self).visit)

    def index(self, layer: int, kv_heads: int) -> tuple[str, dict[str, Any]]:
        return "key_index", {"of_layer": layer, "sm_scale": 1.0}

    def _file(self) -> str:
        if os.fspath(self.path):
            return os.fspath(self.path)
        raise _core.InvalidArgumentError(
            "[TokenButler] path: expected the file of a predictor, such as those of "
            "examples/selectors"
        )

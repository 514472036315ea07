"""AttentionPredictor: Temporal Patterns Matter for KV Cache Compression (Yang et al.,
arXiv:2502.04077).

What a key got of the last rows' attention says what the next row will give it: scores of pages over
some rows are a picture, of which a small convolution makes the row that comes next (section 3.2).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from effinfer import _core
from effinfer.techniques.ranges import integer
from effinfer.techniques.sparse_decode import SparseDecode, sparse_decode
from effinfer.techniques.technique import Meta
from effinfer.techniques.trained_parts import TrainedParts

if TYPE_CHECKING:
    from effinfer.checkpoints.model_files import ModelFiles
    from effinfer.graph import GraphBuilder, Value

KIND = "attention_predictor"
WEIGHTS = 1600  # csrc/ops/history_index.h has their order


@dataclass(frozen=True)
class AttentionPredictor(SparseDecode):
    """
    Args:
        path: the file of a network that was trained for the model; examples/selectors has the
            recipe.
        every: one of so many tokens visits all keys.
    """

    META: ClassVar[Meta] = replace(
        sparse_decode(
            "AttentionPredictor: Temporal Patterns Matter for KV Cache Compression",
            "2502.04077",
            "a page's score is the logarithm of the greatest probability of its keys over the "
            "query heads of a KV head, among the pages that the token visits; pages that it does "
            "not visit keep their last score; one hidden layer of 16 channels over three "
            "neighbouring pages and a direct term, the same for all heads; generated tokens alone "
            "have a history, and the first one visits all keys; its requests are not drafted for",
            name=KIND,
        ),
        primitives=("visits", "scores"),
        needs=("attention", "predictor"),
        exclusive=("decode.visits", "kv.resident"),
    )

    path: str = ""
    every: int = integer(16, least=1)

    def extend(self, target: ModelFiles) -> ModelFiles:
        """The model with the network's weights. Throws what TrainedParts throws."""
        if not os.fspath(self.path):
            raise _core.InvalidArgumentError(
                "[AttentionPredictor] path: expected the file of a network, such as that of "
                "examples/selectors"
            )
        parts = TrainedParts(self.path, KIND, target)
        return replace(target, weights=parts.beside(target.weights))

    def list_of(self, builder: GraphBuilder, node: dict[str, Any], inputs: list[Value]) -> Value:
        op, chosen = self.choice(node)
        network = builder.weight(f"{KIND}.network.weight", "f32", [WEIGHTS])
        return builder.node(op, *inputs[:2], network, *inputs[2:], **chosen)

    def index(self, layer: int, kv_heads: int) -> tuple[str, dict[str, Any]]:
        return "history_index", {"plane": self.name, "every": self.every}

    def facts(self) -> dict[str, str | int]:
        # The rows of its output are in the history: a plane of its name.
        return {**super().facts(), "scores": "output", "chunk_tokens": 2048}

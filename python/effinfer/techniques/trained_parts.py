"""Files of small trained parts that draft for one model, beside its own weights: heads, adapters,
layers, rows. A GGUF file with metadata heads.kind, heads.count, heads.hidden_size and
heads.vocab_size, and the weights that its kind names."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from effinfer import _core
from effinfer.techniques.vocab_trim import find_head

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from effinfer.checkpoints.model_files import ModelFiles


class TrainedParts:
    """An opened file. Throws InvalidArgumentError for parts of another kind or model, FormatError
    for a file of something else, FileError."""

    def __init__(self, path: str | os.PathLike[str], kind: str, target: ModelFiles) -> None:
        self.kind, self.path = kind, path
        self.file = _core.GgufFile(os.fspath(path))
        head = find_head(target.graph)
        name = target.graph.values[head["inputs"][1]]["weight_name"]
        vocab, size = target.weights.shape(name)
        for key, expected in {"kind": kind, "hidden_size": size, "vocab_size": vocab}.items():
            got = self.fact(key)
            if got != expected:
                raise _core.InvalidArgumentError(
                    f"[heads] {path}: expected {key} {expected}, got {got}"
                )
        self.count = int(self.fact("count"))

    def fact(self, key: str) -> Any:
        value = self.file.get(f"heads.{key}")
        if value is None:
            raise _core.FormatError(f"[heads] {self.path}: expected a file with heads.{key}")
        return value

    def add_to(self, weights: _core.LayeredWeights) -> None:
        for tensor in self.file.tensors():
            data = self.file.tensor_bytes(tensor.name)
            weights.add(tensor.name, data, self.file.dtype(tensor.name), list(tensor.shape))

    def beside(self, weights: _core.WeightSource) -> _core.LayeredWeights:
        """A model's weights and these."""
        layered = _core.LayeredWeights(weights)
        self.add_to(layered)
        return layered

    def array(self, name: str) -> npt.NDArray[np.float32]:
        """A weight of this kind, by its short name."""
        return self.file.dequantize(f"{self.kind}.{name}.weight")

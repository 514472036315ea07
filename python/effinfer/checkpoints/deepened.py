"""A deepened twin of a model: the same bits at several times the cost, for measuring drafts where
the large model is not at hand. The model itself then drafts for its twin, and is always right.

Layers are added behind the model's own, with its weights, and with zeros in the two matrices whose
products a layer adds to the residual stream: they cost what a layer costs and add nothing.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from effinfer import _core
from effinfer.checkpoints.model_files import open_model

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_ADDED = ("attn_output.weight", "ffn_down.weight")


def make_twin(
    model: str | os.PathLike[str], path: str | os.PathLike[str], *, depth: int = 8
) -> Path:
    """Writes a GGUF file with `depth` times the layers of the GGUF file `model`; returns its path.

    Throws InvalidArgumentError for a depth below 2, UnsupportedError for a model with biases of
    what is added to the stream and for ternary weights, and what opening and writing files throw.
    """
    if type(depth) is not int or depth < 2:
        raise _core.InvalidArgumentError(f"[make_twin] depth: expected 2 or more, got {depth!r}")
    files = open_model(Path(model))
    source = files.gguf
    if source is None:
        raise _core.UnsupportedError(f"[make_twin] {files.path}: expected a GGUF file")
    layers = int(source.get(f"{files.architecture}.block_count"))
    writer = _core.GgufWriter(str(path))
    writer.copy_metadata(source)
    writer.set(f"{files.architecture}.block_count", np.uint32(layers * depth).item())
    plan = list(_tensors(source, layers, depth))
    for name, origin, _ in plan:
        writer.add_tensor(name, source.dtype(origin), list(source.shape(origin)))
    for _, origin, silent in plan:
        data = source.tensor_bytes(origin)
        writer.write(np.zeros_like(data) if silent else data)
    writer.commit()
    return Path(path)


def _tensors(source: _core.GgufFile, layers: int, depth: int) -> Iterator[tuple[str, str, bool]]:
    """Name, the tensor that it is made of, and whether it is zeros."""
    facts: list[Any] = source.tensors()
    for tensor in facts:
        yield tensor.name, tensor.name, False
        match = _LAYER.match(tensor.name)
        if match is None:
            continue
        part = match[2]
        silent = part in _ADDED
        if part in ("attn_output.bias", "ffn_down.bias") or (
            silent and source.dtype(tensor.name) in ("i2_s", "tq1_0", "tq2_0")
        ):
            raise _core.UnsupportedError(
                f"[make_twin] {tensor.name}: expected a matrix whose zero bytes are zeros"
            )
        for copy in range(1, depth):
            yield f"blk.{int(match[1]) + copy * layers}.{part}", tensor.name, silent

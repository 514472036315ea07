"""Models to GGUF files with other weight types."""

import glob
import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from effinfer import _core
from effinfer.checkpoints.gguf_export import (
    interleaved_rows,
    metadata_of,
    rope_divisors,
    tokenizer_metadata,
)
from effinfer.checkpoints.model_files import GRAPH_KEY, open_model
from effinfer.checkpoints.recommended import recommended_keys
from effinfer.files.i2_s_orders import ORDERS, in_x86_order
from effinfer.hub import resolve
from effinfer.models.gguf_config import TERNARY_KEY

# (tensor, weights done, weights in all); may raise to stop.
Progress = Callable[[str, int, int], None]
Encoded = tuple[npt.NDArray[np.uint8], float]

# What the packings of ternary weights are called, and the file type of each.
ALIASES = {"t2": "i2_s", "t1_6": "tq1_0"}
TERNARY = ("i2_s", "tq1_0", "tq2_0")
# llama_ftype: the number under which a file says what most of its weights are.
FILE_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q4_k": 14,
    "q5_k": 16, "q6_k": 18, "bf16": 32, "tq1_0": 36, "tq2_0": 37, "i2_s": 40,
}  # fmt: skip
TYPES = (*ALIASES, *FILE_TYPES)
BLOCKS = {  # weights of a block
    "q4_0": 32, "q4_1": 32, "q5_0": 32, "q5_1": 32, "q8_0": 32, "q4_k": 256, "q5_k": 256,
    "q6_k": 256, "tq1_0": 256, "tq2_0": 256, "i2_s": 128,
}  # fmt: skip
_OUTER = ("token_embd.weight", "output.weight")
_LAYER_MATRIX = re.compile(r"blk\.\d+\..+\.weight")


@dataclass(frozen=True)
class TensorResult:
    """A tensor of the new file. `error`: norm of the difference over norm of the old values."""

    name: str
    shape: tuple[int, ...]
    source_type: str
    type: str
    num_bytes: int
    error: float


@dataclass(frozen=True)
class QuantizeResult:
    path: Path
    num_bytes: int
    source_bytes: int
    tensors: tuple[TensorResult, ...]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path)}


def quantize(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str],
    type: str,
    *,
    head: str | None = None,
    i2_s_order: str = "x86",
    threads: int | None = None,
    progress: Progress | None = None,
) -> QuantizeResult:
    """Writes `model` (a GGUF file, a Hugging Face folder, a name) as a GGUF file whose layers have
    weights of `type`: t2 or t1_6 (ternary), tq1_0, tq2_0, i2_s, q4_0, q4_1, q5_0, q5_1, q8_0,
    q4_k, q5_k, q6_k, bf16, f16, f32.

    head: type of the token embedding and of the output matrix; None is `type`, or q6_k for ternary
    layers: these two are not ternary. Vectors are float32. Matrices whose rows are no whole blocks
    get q8_0, or f16 where that does not fit either. What has its type already is copied, and
    ternary weights keep their values. i2_s_order: "x86", "arm" or "rows", how a file of bitnet.cpp
    orders them, which the file does not say. The output appears complete or not at all.

    Throws InvalidArgumentError (a type, an output that is the model itself, values that the type
    cannot hold), FileError, FormatError, UnsupportedError.
    """
    body = file_dtype("[quantize] type", type)
    outer = file_dtype("[quantize] head", head) if head else "q6_k" if body in TERNARY else body
    if i2_s_order not in ORDERS:
        raise _core.InvalidArgumentError(
            f"[quantize] i2_s_order: expected one of {', '.join(ORDERS)}, got {i2_s_order!r}"
        )
    path, target = resolve(model), Path(output)
    if target.exists() and any(target.samefile(file) for file in _files_of(path)):
        raise _core.InvalidArgumentError("[quantize] output: expected another file than the model")
    source = _FolderSource(path) if path.is_dir() else _FileSource(path, i2_s_order)
    types = {name: _type_of(source, name, body, outer) for name in source.names}
    writer = _core.GgufWriter(str(target))
    source.write_metadata(writer)
    writer.set("general.file_type", FILE_TYPES[body])
    writer.set("general.quantization_version", 2)
    for name, dtype in types.items():
        writer.add_tensor(name, dtype, source.weights.shape(name))
    pool = _core.ThreadPool(threads or 0)
    results = tuple(_write_tensors(source, writer, types, pool, progress))
    writer.commit()
    return QuantizeResult(target, target.stat().st_size, source.num_bytes, results)


def _files_of(model: Path) -> list[Path]:
    """A model's own files: itself, those of a folder, or all of a split one."""
    split = re.fullmatch(r"(.*)-[0-9]{5}(-of-[0-9]{5}\.gguf)", model.name)
    shards = model.parent.glob(f"{glob.escape(split[1])}-*{split[2]}") if split else ()
    return [model, *model.glob("*"), *shards]


def file_dtype(argument: str, value: str) -> str:
    """The dtype of a name in TYPES; throws InvalidArgumentError, naming the argument."""
    if value not in TYPES:
        raise _core.InvalidArgumentError(
            f"{argument}: expected one of {', '.join(TYPES)}, got {value!r}"
        )
    return ALIASES.get(value, value)


def fitting_dtype(dtype: str, cols: int) -> str:
    """`dtype`, or where rows of `cols` are no whole blocks of it: q8_0, or else f16."""
    fits = (choice for choice in (dtype, "q8_0") if cols % BLOCKS.get(choice, 1) == 0)
    return next(fits, "f16")


class _FileSource:
    """A GGUF file: all its tensors and metadata."""

    def __init__(self, path: Path, i2_s_order: str) -> None:
        self.weights = self.file = _core.GgufFile(str(path))
        self.names = [tensor.name for tensor in self.file.tensors()]
        self.num_bytes = self.file.file_bytes
        self._path = path
        self._order = i2_s_order

    def write_metadata(self, writer: _core.GgufWriter) -> None:
        writer.copy_metadata(self.file)
        writer.remove(GRAPH_KEY)  # which names the types of the weights
        if any(self.file.dtype(name) == "i2_s" for name in self.names):
            writer.set(TERNARY_KEY, True)  # which i2_s says by itself, and other types do not
        for key, value in recommended_keys(self._path, self.file).items():
            writer.set(key, value)

    def encode(self, name: str, dtype: str, pool: _core.ThreadPool) -> Encoded:
        old = self.file.dtype(name)
        data, shape = self.file.tensor_bytes(name), self.file.shape(name)
        if old == "i2_s":
            data = in_x86_order(data, shape, self._order)
        if old == dtype:
            return data, 0.0
        encoded, error = _core.quantize(dtype, data, old, shape, pool)
        return encoded, error


class _FolderSource:
    """A Hugging Face folder: the weights that the model's graph uses."""

    def __init__(self, path: Path) -> None:
        files = open_model(path)
        assert files.config is not None
        self.weights, self._config, self._path = files.weights, files.config, path
        used = (value["weight_name"] for value in files.graph.values.values())
        self.names = [name for name in used if name]
        self.num_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        divisors = rope_divisors(files.config)
        if divisors is not None and isinstance(self.weights, _core.MemoryWeights):
            self.weights.add("rope_freqs.weight", divisors, "f32", divisors.shape)
            self.names.append("rope_freqs.weight")

    def write_metadata(self, writer: _core.GgufWriter) -> None:
        keys = metadata_of(self._config)
        keys.update(tokenizer_metadata(self._path, self._config))
        keys.update(recommended_keys(self._path, None))
        for key, value in keys.items():
            writer.set(key, value)

    def encode(self, name: str, dtype: str, pool: _core.ThreadPool) -> Encoded:
        data, error = _core.quantize_weight(self.weights, name, dtype, pool)
        order = interleaved_rows(self._config, name)
        if order is not None:
            size = math.prod(self.weights.shape(name)) // len(order)
            row_bytes = data.nbytes // len(order) if dtype != "i2_s" else size // 4
            rows = data[: row_bytes * len(order)].reshape(len(order), row_bytes)
            data = np.concatenate([rows[order].ravel(), data[rows.size :]])
        return data, error


def _type_of(source: _FileSource | _FolderSource, name: str, body: str, outer: str) -> str:
    shape, old = source.weights.shape(name), source.weights.dtype(name)
    if len(shape) < 2:
        return "f32"
    if name not in _OUTER and not _LAYER_MATRIX.fullmatch(name):
        return str(old)  # of no part that is known here
    dtype = outer if name in _OUTER else body
    if dtype == "i2_s" and old in ("tq1_0", "tq2_0"):
        dtype = "tq2_0"  # may have a scale a block, which i2_s cannot hold
    return fitting_dtype(dtype, shape[-1])


def _write_tensors(
    source: _FileSource | _FolderSource,
    writer: _core.GgufWriter,
    types: dict[str, str],
    pool: _core.ThreadPool,
    progress: Progress | None,
) -> Iterator[TensorResult]:
    counts = {name: math.prod(source.weights.shape(name)) for name in types}
    done, total = 0, sum(counts.values())
    for name, dtype in types.items():
        data, error = source.encode(name, dtype, pool)
        writer.write(data)
        shape = source.weights.shape(name)
        yield TensorResult(name, shape, source.weights.dtype(name), dtype, data.nbytes, error)
        done += counts[name]
        if progress is not None:
            progress(name, done, total)

"""Reading the safetensors files of a folder."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from effinfer import _core
from effinfer.files.metadata import read_json

DTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


def folder_files(folder: Path) -> list[Path]:
    """The files that the index lists, or all that there are. Throws FormatError, FileError."""
    index = read_json(folder / "model.safetensors.index.json")
    if index:
        names = sorted(set(index.get("weight_map", {}).values()))
        if not names or any(Path(name).name != name for name in names):
            raise _core.FormatError(f"[load] {folder}: weight_map: expected names of files")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise _core.FileError(f"[load] {folder}: no .safetensors files")
    return files


def read_tensors(path: Path) -> Iterator[tuple[str, str, list[int], Any, int]]:
    """(name, dtype, shape, bytes as a read-only map, their offset) of each tensor of a file.

    The library checks the header; the map is ours because numpy has no bfloat16.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise _core.UnsupportedError(
            f"[load] {path}: needs safetensors: pip install 'effinfer[safetensors]'"
        ) from None
    if not path.is_file():
        raise _core.FileError(f"[load] {path}: no such file")
    try:
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise _core.FormatError(f"[load] {path}: {error}") from None
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    data = np.memmap(path, np.uint8, "r")
    for name, facts in header.items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in facts["data_offsets"])
            yield name, facts["dtype"], facts["shape"], data[begin:end], begin


def to_float32(array: Any, dtype: str) -> npt.NDArray[np.float32]:
    """The values of the bytes of an "f32", "f16" or "bf16" tensor, flat."""
    kind = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[dtype]
    values = array.view(kind)
    if dtype == "bf16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(values, np.float32)

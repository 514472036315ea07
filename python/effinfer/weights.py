"""Weights of a Hugging Face folder under the names that GGUF files use."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from effinfer import _core
from effinfer.metadata import read_json

_DTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_OUTER = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_BLOCK = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA_BLOCK = {
    **_BLOCK,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_PREFIXES = ("language_model.model.", "model.language_model.", "language_model.", "model.")


def gguf_name(name: str, architecture: str) -> str | None:
    """The GGUF name of a Hugging Face weight; None for one that the decoder does not use."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            name = name[len(prefix) :]
            break
    if name in _OUTER:
        return _OUTER[name]
    parts = name.split(".")
    if len(parts) < 4 or parts[0] != "layers" or parts[-1] not in ("weight", "bias"):
        return None
    table = _GEMMA_BLOCK if architecture == "gemma3" else _BLOCK
    inner = table.get(".".join(parts[2:-1]))
    return f"blk.{parts[1]}.{inner}.{parts[-1]}" if inner else None


def load_folder_weights(folder: Path, architecture: str, *, tied_head: bool) -> _core.MemoryWeights:
    """The safetensors files of a folder, memory-mapped. Matrices keep their dtype; vectors (norms,
    biases) become float32, and Gemma's norms gain the one that its files leave out.

    Throws FileError (no such file), FormatError (a broken file), UnsupportedError (safetensors is
    not installed, or a dtype that is not read).
    """
    weights = _core.MemoryWeights()
    for path in _files(folder):
        for name, kind, shape, array, offset in _tensors(path):
            target = gguf_name(name, architecture)
            if target is None or (tied_head and target == "output.weight"):
                continue
            if kind not in _DTYPES:
                raise _core.UnsupportedError(
                    f"[load] {name}: expected a dtype of {sorted(_DTYPES)}, got {kind}"
                )
            dtype = _DTYPES[kind]
            if len(shape) == 1:
                array, dtype = _to_float32(array, dtype), "f32"
                if architecture == "gemma3" and target.endswith("norm.weight"):
                    array = array + np.float32(1)
                weights.add(target, array, dtype, shape)
            else:
                weights.add(target, array, dtype, shape, path=path, offset=offset)
    return weights


def _files(folder: Path) -> list[Path]:
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


def _tensors(path: Path) -> Iterator[tuple[str, str, list[int], Any, int]]:
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


def _to_float32(array: Any, dtype: str) -> Any:
    if dtype == "bf16":
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.view(np.float16 if dtype == "f16" else np.float32).astype(np.float32)

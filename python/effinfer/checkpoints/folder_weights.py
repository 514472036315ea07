"""Weights of a Hugging Face folder under the names that GGUF files use."""

from pathlib import Path

import numpy as np

from effinfer import _core
from effinfer.checkpoints.hf_ternary import TernaryFormat, TernaryLayers
from effinfer.files.safetensors_files import DTYPES, folder_files, read_tensors, to_float32
from effinfer.models.families import family_of

_OUTER = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_PREFIXES = ("language_model.model.", "model.language_model.", "language_model.", "model.")


def gguf_name(name: str, architecture: str) -> str | None:
    """The GGUF name of a Hugging Face weight; None for one of another part than the decoder. Throws
    UnsupportedError for one of a decoder that is not the architecture's."""
    full_name = name
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            name = name[len(prefix) :]
            break
    if name in _OUTER:
        return _OUTER[name]
    parts = name.split(".")
    if parts[0] != "layers" or parts[-1] in ("inv_freq", "weight_scale"):
        return None
    module = ".".join(parts[2:-1])
    inner = family_of(architecture).modules.get(module.removesuffix(".rms_norm"))
    if inner is None or len(parts) < 4 or parts[-1] not in ("weight", "bias"):
        raise _core.UnsupportedError(f"[load] {full_name}: {architecture} has no such weight")
    own_norm = ".norm" if module.endswith(".rms_norm") else ""
    return f"blk.{parts[1]}.{inner}{own_norm}.{parts[-1]}"


def load_folder_weights(
    folder: Path, architecture: str, *, tied_head: bool, ternary: TernaryFormat | None = None
) -> _core.MemoryWeights:
    """The safetensors files of a folder, memory-mapped. Matrices keep their dtype; vectors (norms,
    biases) become float32, norms gain what the folders of their family leave out, and ternary
    layers become i2_s.

    Throws FileError (no such file), FormatError (a broken file), UnsupportedError (safetensors is
    not installed, or a dtype that is not read).
    """
    weights = _core.MemoryWeights()
    norm_offset = family_of(architecture).norm_offset
    layers = TernaryLayers(ternary) if ternary is not None else None
    for path in folder_files(folder):
        for name, kind, shape, array, offset in read_tensors(path):
            target = gguf_name(name, architecture)
            origin = (path, offset)
            if layers is not None and layers.take(name, target, kind, shape, array, origin):
                continue
            if target is None or (tied_head and target == "output.weight"):
                continue
            if kind not in DTYPES:
                raise _core.UnsupportedError(
                    f"[load] {name}: expected a dtype of {sorted(DTYPES)}, got {kind}"
                )
            dtype = DTYPES[kind]
            if len(shape) == 1:
                array, dtype = to_float32(array, dtype), "f32"
                if norm_offset and target.endswith("norm.weight"):
                    array = array + np.float32(norm_offset)
                weights.add(target, array, dtype, shape)
            else:
                weights.add(target, array, dtype, shape, path=path, offset=offset)
    if layers is not None:
        layers.add_to(weights)
    return weights

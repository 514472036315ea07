"""Weights of a Hugging Face folder under the names that GGUF files use."""

from pathlib import Path

import numpy as np

from effinfer import _core
from effinfer.files.hf_ternary import TernaryFormat, TernaryLayers
from effinfer.files.safetensors_files import DTYPES, folder_files, read_tensors, to_float32

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
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
    "self_attn.inner_attn_ln": "attn_sub_norm",
    "mlp.ffn_layernorm": "ffn_sub_norm",
}
_GEMMA_BLOCK = {
    **_BLOCK,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
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
    table = _GEMMA_BLOCK if architecture == "gemma3" else _BLOCK
    module = ".".join(parts[2:-1])
    inner = table.get(module.removesuffix(".rms_norm"))
    if inner is None or len(parts) < 4 or parts[-1] not in ("weight", "bias"):
        raise _core.UnsupportedError(f"[load] {full_name}: {architecture} has no such weight")
    own_norm = ".norm" if module.endswith(".rms_norm") else ""
    return f"blk.{parts[1]}.{inner}{own_norm}.{parts[-1]}"


def load_folder_weights(
    folder: Path, architecture: str, *, tied_head: bool, ternary: TernaryFormat | None = None
) -> _core.MemoryWeights:
    """The safetensors files of a folder, memory-mapped. Matrices keep their dtype; vectors (norms,
    biases) become float32, Gemma's norms gain the one that its files leave out, and ternary layers
    become i2_s.

    Throws FileError (no such file), FormatError (a broken file), UnsupportedError (safetensors is
    not installed, or a dtype that is not read).
    """
    weights = _core.MemoryWeights()
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
                if architecture == "gemma3" and target.endswith("norm.weight"):
                    array = array + np.float32(1)
                weights.add(target, array, dtype, shape)
            else:
                weights.add(target, array, dtype, shape, path=path, offset=offset)
    if layers is not None:
        layers.add_to(weights)
    return weights

"""Tiny random models of each family, written as a Hugging Face folder and as a GGUF file.

The weights are made once, in the Hugging Face form, from a fixed seed; the GGUF form follows from
the conventions of that format: rotary pairs of the llama family are interleaved (so rows of q and k
are permuted), Gemma's norm weights include the one that Hugging Face adds at run time, and the
llama3 rope scaling is a tensor of divisors.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers

from tests.reference import ternary
from tests.reference.config import config_from_metadata
from tests.reference.decoder import Decoder

Config = dict[str, Any]
Arrays = dict[str, np.ndarray]

VOCAB_SIZE = 259  # the bytes, one merged pair, begin and end of text
BOS, EOS = 257, 258
MERGE = ("t", "h")
TOKEN_IDS = [BOS] + [(37 * i * i + 11 * i + 5) % 256 for i in range(39)]

_BASE: Config = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
_GEMMA: Config = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "num_hidden_layers": 7,  # five local layers, a global one, and a local one again
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 9,
    "sliding_window_pattern": 6,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}


def _family(kind: str, **options: Any) -> Config:
    named = {"model_type": kind, "architectures": [f"{kind.capitalize()}ForCausalLM"]}
    return {**_BASE, **named, **options}


# Widths of whole blocks of TQ2_0; the first BitNet models call themselves llama.
_TERNARY: Config = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "head_dim": 64,
    "quantization_config": {
        "quant_method": "bitnet",
        "linear_class": "autobitlinear",
        "quantization_mode": "online",
    },
}
TERNARY_FAMILIES: dict[str, Config] = {
    "bitnet": _family(
        "bitnet",
        **_TERNARY,
        architectures=["BitNetForCausalLM"],
        hidden_act="relu2",
        rope_theta=500000.0,
        tie_word_embeddings=True,
    ),
    "bitnet_silu": {
        **_family("llama", **_TERNARY, architectures=["BitnetForCausalLM"]),
        "quantization_config": None,
    },
    "llama_ternary": _family("llama", **_TERNARY),
}
FAMILIES: dict[str, Config] = {
    "llama": _family("llama", rope_scaling=_LLAMA3, rope_theta=500000.0),
    "llama_linear": _family("llama", rope_scaling={"rope_type": "linear", "factor": 4.0}),
    "llama_tied": _family("llama", tie_word_embeddings=True, num_key_value_heads=4),
    "mistral": _family("mistral", sliding_window=7),
    "qwen2": _family("qwen2", tie_word_embeddings=True, use_sliding_window=False),
    "qwen2_yarn": _family("qwen2", rope_scaling=_YARN, use_sliding_window=False),
    "qwen3": _family("qwen3", head_dim=32, rope_theta=1000000.0, use_sliding_window=False),
    "gemma3": {**_BASE, **_GEMMA},
}

_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GEMMA_NAMES = {
    **_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def is_gemma(config: Config) -> bool:
    return config["model_type"].startswith("gemma")


def is_ternary(config: Config) -> bool:
    return config in TERNARY_FAMILIES.values()


def is_bitnet(config: Config) -> bool:
    return config["architectures"][0].lower() == "bitnetforcausallm"


def weights(config: Config) -> Arrays:
    """Float32 weights under their Hugging Face names."""
    random = np.random.default_rng(7)
    hidden, inner, head_dim = (config[k] for k in ("hidden_size", "intermediate_size", "head_dim"))
    q_rows = config["num_attention_heads"] * head_dim
    kv_rows = config["num_key_value_heads"] * head_dim
    arrays: Arrays = {}

    def matrix(name: str, rows: int, columns: int, size: float = 1.0) -> None:
        if is_ternary(config) and ".layers." in name:
            arrays[f"{name}.weight"] = ternary.master_weights(random, rows, columns)
            return
        scale = size / math.sqrt(columns)
        arrays[f"{name}.weight"] = random.normal(0, scale, (rows, columns)).astype(np.float32)

    def norm(name: str, size: int) -> None:
        center = 0.0 if is_gemma(config) else 1.0
        arrays[f"{name}.weight"] = random.normal(center, 0.2, size).astype(np.float32)

    matrix("model.embed_tokens", VOCAB_SIZE, hidden, 4.0)
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            matrix(f"{block}.self_attn.{name}_proj", rows, hidden, 1.5)
            if config["model_type"] == "qwen2":
                bias = random.normal(0, 0.5, rows).astype(np.float32)
                arrays[f"{block}.self_attn.{name}_proj.bias"] = bias
        matrix(f"{block}.self_attn.o_proj", hidden, q_rows)
        if config["model_type"] == "qwen3" or is_gemma(config):
            norm(f"{block}.self_attn.q_norm", head_dim)
            norm(f"{block}.self_attn.k_norm", head_dim)
        matrix(f"{block}.mlp.gate_proj", inner, hidden)
        matrix(f"{block}.mlp.up_proj", inner, hidden)
        matrix(f"{block}.mlp.down_proj", hidden, inner)
        if is_bitnet(config):
            norm(f"{block}.self_attn.attn_sub_norm", q_rows)
            norm(f"{block}.mlp.ffn_sub_norm", inner)
        for name in _GEMMA_NAMES if is_gemma(config) else _NAMES:
            if name.endswith("layernorm"):
                norm(f"{block}.{name}", hidden)
    norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        matrix("lm_head", VOCAB_SIZE, hidden, 2.0)
    return arrays


def tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE with one merge."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "".join(MERGE)]
    vocab = {symbol: index for index, symbol in enumerate(symbols)}
    result = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[MERGE]))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens(["<bos>", "<eos>"])
    return result


def write_folder(config: Config, folder: Path, arrays: Arrays | None = None) -> Path:
    """A Hugging Face folder: config.json, model.safetensors (weights() by default),
    tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    arrays = weights(config) if arrays is None else arrays
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def llama3_divisors(config: Config) -> np.ndarray:
    """What the inverse frequencies are divided by: 1 for short waves, `factor` for long ones."""
    scaling = config["rope_scaling"]
    old = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    exponent = np.arange(0, config["head_dim"], 2) / config["head_dim"]
    rotations = old / (2 * np.pi * config["rope_theta"] ** exponent)
    smooth = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / scaling["factor"] + smooth)).astype(np.float32)


def interleave_pairs(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of each head from (first half, second half) to pairs of neighbours."""
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def gguf_weights(config: Config) -> Arrays:
    names = _GEMMA_NAMES if is_gemma(config) else _NAMES
    outer = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
    arrays: Arrays = {}
    for name, array in weights(config).items():
        stem, suffix = name.removeprefix("model.").rsplit(".", 1)
        if is_gemma(config) and stem.endswith("norm"):
            array = array + np.float32(1)
        if architecture(config) == "llama" and stem.endswith(("q_proj", "k_proj")):
            kind = "attention" if stem.endswith("q_proj") else "key_value"
            array = interleave_pairs(array, config[f"num_{kind}_heads"])
        if stem.startswith("layers."):
            _, layer, inner = stem.split(".", 2)
            arrays[f"blk.{layer}.{names[inner]}.{suffix}"] = array
        else:
            arrays[f"{outer[stem]}.{suffix}"] = array
    if (config.get("rope_scaling") or {}).get("rope_type") == "llama3":
        arrays["rope_freqs.weight"] = llama3_divisors(config)
    return arrays


def gguf_metadata(config: Config) -> Config:
    """Every key but general.architecture and the tokenizer's."""
    keys: Config = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
        "rope.dimension_count": config["head_dim"],
        "vocab_size": config["vocab_size"],
    }
    if config.get("sliding_window"):
        keys["attention.sliding_window"] = config["sliding_window"]
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") in ("linear", "yarn"):
        keys["rope.scaling.type"] = scaling["rope_type"]
        keys["rope.scaling.factor"] = scaling["factor"]
    if scaling.get("rope_type") == "yarn":
        original = scaling["original_max_position_embeddings"]
        keys["rope.scaling.original_context_length"] = original
    return keys


def architecture(config: Config) -> str:
    """GGUF's name of the family."""
    if is_bitnet(config):
        return "bitnet" if config["hidden_act"] == "silu" else "bitnet-b1.58"
    names = {"mistral": "llama", "gemma3_text": "gemma3"}
    return names.get(config["model_type"], config["model_type"])


def write_gguf(
    config: Config,
    path: Path,
    ternary_type: str = "i2_s",
    *,
    chat_template: str | None = None,
    split_tensors: int = 0,
) -> Path:
    """Ternary layers have a type of their own, "i2_s", "tq1_0" or "tq2_0"; the rest is float32.
    With `split_tensors` it is split into files of so many tensors; the first is returned."""
    name = architecture(config)
    writer = gguf.GGUFWriter(str(path), name, split_max_tensors=split_tensors)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for key, value in gguf_metadata(config).items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        if isinstance(value, str):
            add = writer.add_string
        add(f"{name}.{key}", value)
    words = tokenizer()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([words.id_to_token(i) for i in range(VOCAB_SIZE)])
    writer.add_token_types([1] * BOS + [3, 3])
    writer.add_token_merges([" ".join(MERGE)])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(False)
    for tensor, array in gguf_weights(config).items():
        if is_ternary(config) and ternary.is_layer(tensor):
            ternary.add_tensor(writer, tensor, array, ternary_type)
        else:
            writer.add_tensor(tensor, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if split_tensors else path


def ternary_decoder(family: str) -> Decoder:
    """The reference for one of TERNARY_FAMILIES, over the values of its GGUF file."""
    config = TERNARY_FAMILIES[family]
    name = architecture(config)
    metadata = {f"{name}.{key}": value for key, value in gguf_metadata(config).items()}
    facts = config_from_metadata({"general.architecture": name, **metadata})
    arrays: dict[str, torch.Tensor] = {}
    scales: dict[str, float] = {}
    for tensor, array in gguf_weights(config).items():
        values = array
        if ternary.is_layer(tensor):
            values, scales[tensor] = ternary.absmean(array)
        arrays[tensor] = torch.tensor(values, dtype=torch.float32)
    return Decoder(facts, arrays, scales)

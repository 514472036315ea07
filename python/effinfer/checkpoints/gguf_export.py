"""What a GGUF file says of a model, from a Hugging Face folder."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from effinfer import _core
from effinfer.files.metadata import read_json, token_text
from effinfer.models.config import ModelConfig, RopeConfig
from effinfer.models.families import family_of, gguf_name
from effinfer.models.gguf_config import TERNARY_KEY, config_from_gguf
from effinfer.text.tokenizer_gguf import (
    CONTROL,
    GPT2,
    HF_TOKENIZER_KEY,
    NORMAL,
    PATTERNS,
    UNUSED,
    USER_DEFINED,
)

_ROPE_FREQS = "rope_freqs.weight"


def metadata_of(config: ModelConfig) -> dict[str, Any]:
    """The keys of GGUF that describe a decoder, its tokenizer left out. Throws UnsupportedError
    where they cannot say what `config` does."""
    architecture = gguf_name(config)
    keys: dict[str, Any] = {
        "block_count": config.num_layers,
        "context_length": config.context_length,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.dimension_count": config.rope_dims,
        "rope.freq_base": config.rope.theta,
        "vocab_size": config.vocab_size,
    }
    if config.sliding_window:
        keys["attention.sliding_window"] = config.sliding_window
    if config.attention_soft_cap:
        keys["attn_logit_softcapping"] = config.attention_soft_cap
    if config.final_soft_cap:
        keys["final_logit_softcapping"] = config.final_soft_cap
    if config.rope_local is not None:
        keys["rope.freq_base_swa"] = config.rope_local.theta
    keys.update(_rope_keys(config.rope))
    metadata: dict[str, Any] = {"general.architecture": architecture}
    if config.ternary:
        metadata[TERNARY_KEY] = True
    metadata.update((f"{architecture}.{key}", value) for key, value in keys.items())
    _check(config, metadata)
    return metadata


def _rope_keys(rope: RopeConfig) -> dict[str, Any]:
    """llama3's scaling is a tensor (rope_divisors), not keys."""
    if rope.scaling == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": rope.factor}
    if rope.scaling == "yarn":
        return {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope.factor,
            "rope.scaling.original_context_length": rope.original_max_position,
            "rope.scaling.yarn_beta_fast": rope.beta_fast,
            "rope.scaling.yarn_beta_slow": rope.beta_slow,
        }
    return {}


def _check(config: ModelConfig, metadata: dict[str, Any]) -> None:
    """Whether a reader of the file gets the same model."""
    again = config_from_gguf(
        metadata,
        vocab_size=config.vocab_size,
        tied_head=config.tied_head,
        eos_token_ids=config.eos_token_ids,
    )
    again = replace(again, rope_interleaved=config.rope_interleaved)
    if config.rope.scaling == "llama3":
        again = replace(again, rope=config.rope)
    for field, value in vars(config).items():
        if getattr(again, field) != value:
            raise _core.UnsupportedError(
                f"[quantize] {field}: GGUF files of {config.architecture} cannot hold {value!r}"
            )


def rope_divisors(config: ModelConfig) -> npt.NDArray[np.float32] | None:
    """The tensor rope_freqs.weight of llama3's scaling: 1 for short waves, `factor` for long ones,
    and in between what interpolates the frequencies. None for other scalings."""
    rope = config.rope
    if rope.scaling != "llama3":
        return None
    exponent = np.arange(0, config.rope_dims, 2) / config.rope_dims
    rotations = rope.original_max_position / (2 * np.pi * rope.theta**exponent)
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth = np.clip((rotations - rope.low_freq_factor) / span, 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / rope.factor + smooth)).astype(np.float32)


def interleaved_rows(config: ModelConfig, name: str) -> npt.NDArray[np.intp] | None:
    """The order of the rows of q and k where a family's GGUF files rotate neighbours, (2i, 2i + 1),
    and its folders rotate (i, i + dims / 2). None for weights whose rows stay."""
    if not family_of(config.architecture).gguf_interleaved or not name.startswith("blk."):
        return None
    part = name.split(".")[2]
    if part not in ("attn_q", "attn_k"):
        return None
    heads = config.num_heads if part == "attn_q" else config.num_kv_heads
    rows = np.arange(heads * config.head_dim).reshape(heads, 2, -1)
    order: npt.NDArray[np.intp] = rows.swapaxes(1, 2).ravel()
    return order


def tokenizer_metadata(folder: Path, config: ModelConfig) -> dict[str, Any]:
    """The tokenizer of a folder: tokenizer.json as it is, which effinfer reads, and for byte-level
    BPE the keys that other programs read. {} for a folder without a tokenizer."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return {}
    facts = read_json(path)
    keys: dict[str, Any] = {HF_TOKENIZER_KEY: json.dumps(facts, ensure_ascii=False)}
    model = facts.get("model") or {}
    added = {token["id"]: token for token in facts.get("added_tokens", [])}
    vocab = {**model.get("vocab", {}), **{token["content"]: i for i, token in added.items()}}
    if model.get("type") == "BPE" and not model.get("byte_fallback"):
        keys.update(_byte_level_keys(model, vocab, added, config.vocab_size))
        keys["tokenizer.ggml.pre"] = _pre_tokenizer(facts.get("pre_tokenizer") or {})
    texts = read_json(folder / "tokenizer_config.json")
    for kind in ("bos", "eos", "pad"):
        token = token_text(texts.get(f"{kind}_token"))
        if token in vocab:
            keys[f"tokenizer.ggml.{kind}_token_id"] = vocab[token]
    ends = [keys.get("tokenizer.ggml.eos_token_id"), *config.eos_token_ids]
    known = dict.fromkeys(end for end in ends if end is not None)
    for kind, end in zip(("eos", "eot", "eom"), known, strict=False):
        keys[f"tokenizer.ggml.{kind}_token_id"] = end
    template = folder / "chat_template.jinja"
    if template.is_file():
        keys["tokenizer.chat_template"] = template.read_text(encoding="utf-8")
    elif isinstance(texts.get("chat_template"), str):
        keys["tokenizer.chat_template"] = texts["chat_template"]
    return keys


def _pre_tokenizer(facts: dict[str, Any]) -> str:
    """GGUF's name of the pre-tokeniser that splits so; "default", GPT-2's, for an unknown one."""
    patterns = []
    for stage in facts.get("pretokenizers", [facts]):
        kind = stage.get("type")
        if kind == "Split":
            patterns.append((stage.get("pattern") or {}).get("Regex"))
        elif kind == "Digits" and stage.get("individual_digits"):
            patterns.append(r"\p{N}")
        elif kind == "ByteLevel" and stage.get("use_regex", True):
            patterns.append(GPT2)
    return next((name for name, known in PATTERNS.items() if known == patterns), "default")


def _byte_level_keys(
    model: dict[str, Any], vocab: dict[str, int], added: dict[int, Any], vocab_size: int
) -> dict[str, Any]:
    texts = {index: text for text, index in vocab.items()}
    size = max(vocab_size, *texts) if texts else vocab_size
    types = np.full(size, UNUSED, np.int32)
    for index in texts:
        types[index] = NORMAL
    for index, token in added.items():
        types[index] = CONTROL if token.get("special") else USER_DEFINED
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [texts.get(i, f"[PAD{i}]") for i in range(size)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
    }

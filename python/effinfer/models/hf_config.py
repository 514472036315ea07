"""ModelConfig from the config.json of a Hugging Face folder."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from effinfer import _core
from effinfer.models.config import (
    GEMMA3_LOCAL_THETA,
    GEMMA3_PATTERN,
    HF_ARCHITECTURES,
    ModelConfig,
    RopeConfig,
    sliding_pattern,
    yarn_mscale,
)


def config_from_hf(config: Mapping[str, Any], *, eos_token_ids: Sequence[int]) -> ModelConfig:
    """From config.json (its text_config for multimodal Gemma 3). Throws FormatError for a missing
    key, UnsupportedError for a model type or option that no definition covers."""
    if "text_config" in config:
        keys = ("model_type", "tie_word_embeddings")
        inherited = {key: config[key] for key in keys if key in config}
        config = {**inherited, **config["text_config"]}
    model_type = config.get("model_type")
    if model_type not in HF_ARCHITECTURES:
        raise _core.UnsupportedError(
            f"[load] model_type: expected one of {sorted(HF_ARCHITECTURES)}, got {model_type!r}"
        )
    architecture = HF_ARCHITECTURES[model_type]
    # The first BitNet checkpoints call themselves llama.
    if "BitnetForCausalLM" in (config.get("architectures") or ()):
        architecture = "bitnet"
    gemma = architecture == "gemma3"

    def get(key: str) -> Any:
        if config.get(key) is None:
            raise _core.FormatError(f"[load] {key}: missing from config.json")
        return config[key]

    num_heads, hidden_size = int(get("num_attention_heads")), int(get("hidden_size"))
    head_dim = int(config.get("head_dim") or hidden_size // num_heads)
    sliding = _sliding_layers(config, architecture)
    rope, rope_local = _ropes(config, architecture)
    quantization = config.get("quantization_config") or {}
    return ModelConfig(
        architecture=architecture,
        vocab_size=int(get("vocab_size")),
        hidden_size=hidden_size,
        intermediate_size=int(get("intermediate_size")),
        num_layers=int(get("num_hidden_layers")),
        num_heads=num_heads,
        num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
        head_dim=head_dim,
        rope_dims=int(head_dim * float(config.get("partial_rotary_factor") or 1.0)),
        context_length=int(get("max_position_embeddings")),
        norm_eps=float(get("rms_norm_eps")),
        rope=rope,
        rope_local=rope_local,
        attention_scale=1.0
        / math.sqrt(config.get("query_pre_attn_scalar") or head_dim if gemma else head_dim),
        sliding_window=int(config["sliding_window"]) if any(sliding) else None,
        sliding_layers=sliding if any(sliding) else (),
        attention_soft_cap=float(config.get("attn_logit_softcapping") or 0.0),
        final_soft_cap=float(config.get("final_logit_softcapping") or 0.0),
        activation=_activation(config, architecture),
        ternary=architecture == "bitnet" or quantization.get("quant_method") == "bitnet",
        linear_norm_eps=float(quantization.get("rms_norm_eps") or 1e-6),
        tied_head=bool(config.get("tie_word_embeddings", gemma)),
        eos_token_ids=tuple(eos_token_ids),
    )


def _activation(config: Mapping[str, Any], architecture: str) -> str:
    """The operator of hidden_act."""
    given = config.get("hidden_activation") or config.get("hidden_act")
    known = {"silu": "silu"}
    if architecture == "gemma3":
        known = {"gelu_pytorch_tanh": "gelu_tanh"}
    elif architecture == "bitnet":
        known = {"relu2": "relu_squared", "silu": "silu"}
    if given is None:
        return next(iter(known.values()))
    if given not in known:
        expected = " or ".join(repr(name) for name in known)
        raise _core.UnsupportedError(f"[load] hidden_act: expected {expected}, got {given!r}")
    return known[given]


def _sliding_layers(config: Mapping[str, Any], architecture: str) -> tuple[bool, ...]:
    num_layers = int(config.get("num_hidden_layers") or 0)
    if not config.get("sliding_window"):
        return ()
    types = config.get("layer_types")
    if types is not None:
        if len(types) != num_layers:
            raise _core.FormatError(
                f"[load] layer_types: expected {num_layers} entries, got {len(types)}"
            )
        return tuple(kind == "sliding_attention" for kind in types)
    if architecture == "gemma3":
        return sliding_pattern(
            num_layers, int(config.get("sliding_window_pattern") or GEMMA3_PATTERN)
        )
    if architecture.startswith("qwen"):
        if not config.get("use_sliding_window"):
            return ()
        first = int(config.get("max_window_layers") or 0)
        return tuple(layer >= first for layer in range(num_layers))
    return (True,) * num_layers


def _ropes(config: Mapping[str, Any], architecture: str) -> tuple[RopeConfig, RopeConfig | None]:
    """(the model's RoPE, that of sliding layers where it differs). Reads `rope_parameters`, flat or
    by layer type, and the older `rope_theta`, `rope_scaling`, `rope_local_base_freq`."""
    parameters = config.get("rope_parameters")
    gemma = architecture == "gemma3"
    default_theta = {"gemma3": 1e6, "bitnet": 5e5}.get(architecture, 10000.0)
    if parameters and isinstance(parameters.get("full_attention"), Mapping):
        full = _rope(parameters["full_attention"], config, default_theta)
        local = parameters.get("sliding_attention") or {}
        return full, _rope(local, config, GEMMA3_LOCAL_THETA) if gemma else None
    scaling = {**(config.get("rope_scaling") or {}), **(parameters or {})}
    if config.get("rope_theta") is not None:
        scaling.setdefault("rope_theta", config["rope_theta"])
    local_theta = float(config.get("rope_local_base_freq") or GEMMA3_LOCAL_THETA)
    return _rope(scaling, config, default_theta), RopeConfig(local_theta) if gemma else None


def _rope(
    scaling: Mapping[str, Any], config: Mapping[str, Any], default_theta: float
) -> RopeConfig:
    theta = float(scaling.get("rope_theta") or default_theta)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta)

    def get(key: str, default: float | None = None) -> float:
        value = scaling.get(key)
        value = default if value is None else value
        if value is None:
            raise _core.FormatError(f"[load] rope_scaling.{key}: missing from config.json")
        return float(value)

    if kind == "linear":
        return RopeConfig(theta, "linear", get("factor"))
    limit = float(config.get("max_position_embeddings") or 0)
    original = int(get("original_max_position_embeddings", limit))
    if kind == "llama3":
        return RopeConfig(
            theta,
            "llama3",
            get("factor"),
            original_max_position=original,
            low_freq_factor=get("low_freq_factor"),
            high_freq_factor=get("high_freq_factor"),
        )
    if kind == "yarn":
        factor = get("factor", limit / original)
        if scaling.get("truncate") is False:
            raise _core.UnsupportedError("[load] rope_scaling.truncate: only true is supported")
        default = yarn_mscale(factor)
        if scaling.get("mscale") and scaling.get("mscale_all_dim"):
            default = yarn_mscale(factor, get("mscale")) / yarn_mscale(
                factor, get("mscale_all_dim")
            )
        return RopeConfig(
            theta,
            "yarn",
            factor,
            original_max_position=original,
            beta_fast=get("beta_fast", 32.0),
            beta_slow=get("beta_slow", 1.0),
            attention_factor=get("attention_factor", default),
        )
    raise _core.UnsupportedError(
        f"[load] rope_scaling.rope_type: expected default, linear, llama3 or yarn, got {kind!r}"
    )

"""ModelConfig from the config.json of a Hugging Face folder."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from effinfer import _core
from effinfer.files.fields import Fields
from effinfer.models.config import (
    GEMMA3_LOCAL_THETA,
    GEMMA3_PATTERN,
    HF_ARCHITECTURES,
    MAX_LAYERS,
    ModelConfig,
    RopeConfig,
    sliding_pattern,
    yarn_mscale,
)

_SOURCE = "config.json"


def config_from_hf(config: Mapping[str, Any], *, eos_token_ids: Sequence[int]) -> ModelConfig:
    """From config.json (its text_config for multimodal Gemma 3). Throws FormatError for a missing
    or senseless value, UnsupportedError for a model type or option that no definition covers."""
    if "text_config" in config:
        keys = ("model_type", "tie_word_embeddings")
        inherited = {key: config[key] for key in keys if key in config}
        config = {**inherited, **Fields.of(config, _SOURCE).section("text_config")}
    fields = Fields.of(config, _SOURCE)
    model_type = fields.text("model_type")
    if model_type not in HF_ARCHITECTURES:
        raise _core.UnsupportedError(
            f"[load] model_type: expected one of {sorted(HF_ARCHITECTURES)}, got {model_type!r}"
        )
    architecture = HF_ARCHITECTURES[model_type]
    # The first BitNet checkpoints call themselves llama.
    if "BitnetForCausalLM" in fields.texts("architectures"):
        architecture = "bitnet"
    gemma = architecture == "gemma3"
    num_heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    scale_dim = fields.number("query_pre_attn_scalar", head_dim, positive=True)
    sliding = _sliding_layers(fields, architecture)
    rope, rope_local = _ropes(fields, architecture)
    quantization = Fields.of(fields.section("quantization_config"), _SOURCE, "quantization_config.")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers", high=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rope_dims=int(head_dim * fields.number("partial_rotary_factor", 1.0, high=1.0)),
        context_length=fields.integer("max_position_embeddings"),
        norm_eps=fields.number("rms_norm_eps"),
        rope=rope,
        rope_local=rope_local,
        attention_scale=1.0 / math.sqrt(scale_dim if gemma else head_dim),
        sliding_window=fields.integer("sliding_window") if any(sliding) else None,
        sliding_layers=sliding if any(sliding) else (),
        attention_soft_cap=fields.number("attn_logit_softcapping", 0.0),
        final_soft_cap=fields.number("final_logit_softcapping", 0.0),
        activation=_activation(fields, architecture),
        ternary=architecture == "bitnet" or quantization.text("quant_method", "") == "bitnet",
        linear_norm_eps=quantization.number("rms_norm_eps", 1e-6),
        tied_head=fields.flag("tie_word_embeddings", gemma),
        eos_token_ids=tuple(eos_token_ids),
    )


def _activation(fields: Fields, architecture: str) -> str:
    """The operator of hidden_act."""
    known = {"silu": "silu"}
    if architecture == "gemma3":
        known = {"gelu_pytorch_tanh": "gelu_tanh"}
    elif architecture == "bitnet":
        known = {"relu2": "relu_squared", "silu": "silu"}
    usual = next(iter(known))
    given = fields.text("hidden_activation", fields.text("hidden_act", usual))
    if given not in known:
        expected = " or ".join(repr(name) for name in known)
        raise _core.UnsupportedError(f"[load] hidden_act: expected {expected}, got {given!r}")
    return known[given]


def _sliding_layers(fields: Fields, architecture: str) -> tuple[bool, ...]:
    num_layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    if not fields.integer("sliding_window", 0, low=0):
        return ()
    if "layer_types" in fields:
        types = fields.texts("layer_types")
        if len(types) != num_layers:
            raise _core.FormatError(
                f"[load] layer_types: expected {num_layers} entries, got {len(types)}"
            )
        return tuple(kind == "sliding_attention" for kind in types)
    if architecture == "gemma3":
        return sliding_pattern(num_layers, fields.integer("sliding_window_pattern", GEMMA3_PATTERN))
    if architecture.startswith("qwen"):
        if not fields.flag("use_sliding_window"):
            return ()
        first = fields.integer("max_window_layers", 0, low=0)
        return tuple(layer >= first for layer in range(num_layers))
    return (True,) * num_layers


def _ropes(fields: Fields, architecture: str) -> tuple[RopeConfig, RopeConfig | None]:
    """(the model's RoPE, that of sliding layers where it differs). Reads `rope_parameters`, flat or
    by layer type, and the older `rope_theta`, `rope_scaling`, `rope_local_base_freq`."""
    parameters = fields.section("rope_parameters")
    gemma = architecture == "gemma3"
    limit = fields.integer("max_position_embeddings")
    default_theta = {"gemma3": 1e6, "bitnet": 5e5}.get(architecture, 10000.0)
    by_type = Fields.of(parameters, _SOURCE, "rope_parameters.")
    if "full_attention" in by_type:
        full = _rope(by_type.section("full_attention"), limit, default_theta)
        local = by_type.section("sliding_attention")
        return full, _rope(local, limit, GEMMA3_LOCAL_THETA) if gemma else None
    scaling = {**fields.section("rope_scaling"), **parameters}
    theta = fields.number("rope_theta", default_theta, positive=True)
    local_theta = fields.number("rope_local_base_freq", GEMMA3_LOCAL_THETA, positive=True)
    return _rope(scaling, limit, theta), RopeConfig(local_theta) if gemma else None


def _rope(values: Mapping[str, Any], limit: int, default_theta: float) -> RopeConfig:
    """`limit`: max_position_embeddings."""
    scaling = Fields.of(values, _SOURCE, "rope_scaling.")
    theta = scaling.number("rope_theta", default_theta, positive=True)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", scaling.number("factor", positive=True))
    original = scaling.integer("original_max_position_embeddings", limit)
    if kind == "llama3":
        return RopeConfig(
            theta,
            "llama3",
            scaling.number("factor", positive=True),
            original_max_position=original,
            low_freq_factor=scaling.number("low_freq_factor", positive=True),
            high_freq_factor=scaling.number("high_freq_factor", positive=True),
        )
    if kind == "yarn":
        factor = scaling.number("factor", limit / original, positive=True)
        if not scaling.flag("truncate", True):
            raise _core.UnsupportedError("[load] rope_scaling.truncate: only true is supported")
        mscale, of_all = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)
        default = yarn_mscale(factor)
        if mscale and of_all:
            default = yarn_mscale(factor, mscale) / yarn_mscale(factor, of_all)
        return RopeConfig(
            theta,
            "yarn",
            factor,
            original_max_position=original,
            beta_fast=scaling.number("beta_fast", 32.0, positive=True),
            beta_slow=scaling.number("beta_slow", 1.0, positive=True),
            attention_factor=scaling.number("attention_factor", default),
        )
    raise _core.UnsupportedError(
        f"[load] rope_scaling.rope_type: expected default, linear, llama3 or yarn, got {kind!r}"
    )

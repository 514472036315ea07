"""ModelConfig from the config.json of a Hugging Face folder."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from effinfer import _core
from effinfer.files.fields import Fields
from effinfer.models.config import MAX_LAYERS, ModelConfig, RopeConfig, yarn_mscale
from effinfer.models.families import family_of_folder
from effinfer.models.family import Family

_SOURCE = "config.json"


def config_from_hf(config: Mapping[str, Any], *, eos_token_ids: Sequence[int]) -> ModelConfig:
    """The config that config.json tells (its text_config for multimodal Gemma 3). Throws
    FormatError for a missing or senseless value, UnsupportedError for a model type or option that
    no definition covers."""
    if "text_config" in config:
        keys = ("model_type", "tie_word_embeddings")
        inherited = {key: config[key] for key in keys if key in config}
        config = {**inherited, **Fields.of(config, _SOURCE).section("text_config")}
    fields = Fields.of(config, _SOURCE)
    family = family_of_folder(fields)
    num_heads, hidden_size = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    num_layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    sliding = _sliding_layers(fields, family, num_layers)
    rope, rope_local = _ropes(fields, family)
    quantization = Fields.of(fields.section("quantization_config"), _SOURCE, "quantization_config.")
    read = ModelConfig(
        architecture=family.name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rope_dims=int(head_dim * fields.number("partial_rotary_factor", 1.0, high=1.0)),
        context_length=fields.integer("max_position_embeddings"),
        norm_eps=fields.number("rms_norm_eps"),
        rope=rope,
        rope_local=rope_local,
        attention_scale=1.0 / math.sqrt(head_dim),
        sliding_window=fields.integer("sliding_window") if any(sliding) else None,
        sliding_layers=sliding if any(sliding) else (),
        attention_soft_cap=fields.number("attn_logit_softcapping", 0.0),
        final_soft_cap=fields.number("final_logit_softcapping", 0.0),
        activation=_activation(fields, family),
        ternary=family.ternary or quantization.text("quant_method", "") == "bitnet",
        linear_norm_eps=quantization.number("rms_norm_eps", 1e-6),
        tied_head=fields.flag("tie_word_embeddings", family.tied_head),
        eos_token_ids=tuple(eos_token_ids),
    )
    return family.refine_folder(read, fields)


def _activation(fields: Fields, family: Family) -> str:
    """The operator of hidden_act."""
    known = family.activations
    usual = next(iter(known))
    given = fields.text("hidden_activation", fields.text("hidden_act", usual))
    if given not in known:
        expected = " or ".join(repr(name) for name in known)
        raise _core.UnsupportedError(f"[load] hidden_act: expected {expected}, got {given!r}")
    return known[given]


def _sliding_layers(fields: Fields, family: Family, num_layers: int) -> tuple[bool, ...]:
    if not fields.integer("sliding_window", 0, low=0):
        return ()
    if "layer_types" not in fields:
        return family.sliding_layers(num_layers, fields)
    types = fields.texts("layer_types")
    if len(types) != num_layers:
        raise _core.FormatError(
            f"[load] layer_types: expected {num_layers} entries, got {len(types)}"
        )
    return tuple(kind == "sliding_attention" for kind in types)


def _ropes(fields: Fields, family: Family) -> tuple[RopeConfig, RopeConfig | None]:
    """(the model's RoPE, that of sliding layers where it differs). Reads `rope_parameters`, flat or
    by layer type, and the older `rope_theta`, `rope_scaling`, `rope_local_base_freq`."""
    parameters = fields.section("rope_parameters")
    limit = fields.integer("max_position_embeddings")
    local_theta = family.local_rope_theta
    by_type = Fields.of(parameters, _SOURCE, "rope_parameters.")
    if "full_attention" in by_type:
        full = _rope(by_type.section("full_attention"), limit, family.rope_theta)
        local = by_type.section("sliding_attention")
        return full, None if local_theta is None else _rope(local, limit, local_theta)
    scaling = {**fields.section("rope_scaling"), **parameters}
    rope = _rope(scaling, limit, fields.number("rope_theta", family.rope_theta, positive=True))
    if local_theta is None:
        return rope, None
    return rope, RopeConfig(fields.number("rope_local_base_freq", local_theta, positive=True))


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

"""ModelConfig from GGUF metadata."""

import math
from collections.abc import Sequence

from effinfer import _core
from effinfer.files.fields import Fields
from effinfer.files.metadata import Metadata
from effinfer.models.config import MAX_LAYERS, ModelConfig, RopeConfig, yarn_mscale
from effinfer.models.families import family_of_gguf

TERNARY_KEY = "effinfer.ternary"  # ModelConfig.ternary


def config_from_gguf(
    metadata: Metadata, *, vocab_size: int, tied_head: bool, eos_token_ids: Sequence[int]
) -> ModelConfig:
    """The config in GGUF metadata; `vocab_size` is the rows of token_embd.weight. Throws
    FormatError for a missing or senseless value, UnsupportedError for an architecture or option
    that no definition covers."""
    name = Fields(metadata.get, "the metadata").text("general.architecture")
    family = family_of_gguf(name)
    fields = Fields(lambda key: metadata.get(f"{name}.{key}"), "the metadata", f"{name}.")
    num_heads = fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    num_layers = fields.integer("block_count", high=MAX_LAYERS)
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise _core.UnsupportedError("[load] attention.value_length: differs from key_length")
    window = fields.integer("attention.sliding_window", 0, low=0)
    local_theta = family.local_rope_theta
    if local_theta is not None:
        local_theta = fields.number("rope.freq_base_swa", local_theta, positive=True)
    config = ModelConfig(
        architecture=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rope_dims=fields.integer("rope.dimension_count", head_dim),
        context_length=fields.integer("context_length"),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(fields),
        rope_local=None if local_theta is None else RopeConfig(local_theta),
        rope_interleaved=family.gguf_interleaved,
        activation=family.gguf_names[name],
        ternary=family.ternary or bool(metadata.get(TERNARY_KEY, False)),
        attention_scale=1.0 / math.sqrt(head_dim),
        sliding_window=window or None,
        sliding_layers=(True,) * num_layers if window else (),
        attention_soft_cap=fields.number("attn_logit_softcapping", 0.0),
        final_soft_cap=fields.number("final_logit_softcapping", 0.0),
        tied_head=tied_head,
        eos_token_ids=tuple(eos_token_ids),
    )
    return family.refine_gguf(config)


def _rope(fields: Fields) -> RopeConfig:
    theta = fields.number("rope.freq_base", 10000.0, positive=True)
    factor = fields.number("rope.scaling.factor", 1.0, positive=True)
    kind = fields.text("rope.scaling.type", "linear")
    if kind == "none" or factor == 1.0:
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", factor)
    if kind == "yarn":
        return RopeConfig(
            theta,
            "yarn",
            factor,
            original_max_position=fields.integer("rope.scaling.original_context_length"),
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0, positive=True),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0, positive=True),
            attention_factor=fields.number("rope.scaling.attn_factor", 1.0) * yarn_mscale(factor),
        )
    raise _core.UnsupportedError(
        f"[load] rope.scaling.type: expected none, linear or yarn, got {kind!r}"
    )

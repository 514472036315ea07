"""What a decoder-only model is made of, from GGUF metadata or from a Hugging Face config.json."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from effinfer import _core
from effinfer.files.fields import Fields
from effinfer.files.metadata import Metadata

# Architecture (GGUF general.architecture) by Hugging Face model_type.
HF_ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "gemma3": "gemma3",
    "bitnet": "bitnet",
}
# Other names of an architecture in GGUF files: bitnet.cpp tells its squared ReLU by the name.
GGUF_ALIASES = {"bitnet-25": "bitnet", "bitnet-b1.58": "bitnet"}
TERNARY_KEY = "effinfer.ternary"  # of GGUF files: ModelConfig.ternary
GEMMA3_PATTERN = 6  # one layer in six, the last, is global
GEMMA3_LOCAL_THETA = 10000.0
MAX_LAYERS = 65536  # no model comes near; a file may say anything
GEMMA3_27B_LAYERS = 62  # the size whose queries are scaled by hidden_size / num_heads


@dataclass(frozen=True)
class RopeConfig:
    """How positions become angles; `scaling` is "none", "linear", "llama3" or "yarn" (the
    attributes of the `rope_table` operator)."""

    theta: float = 10000.0
    scaling: str = "none"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_dims: int
    context_length: int
    norm_eps: float
    rope: RopeConfig
    attention_scale: float
    # Pairs (2i, 2i + 1) are rotated together: GGUF files of the llama family are permuted for that.
    rope_interleaved: bool = False
    activation: str = "silu"  # of the gated MLP: an operator
    # Weights of ternary types multiply int8 rows of one scale, as the model was trained (i2_s ones
    # always do: no other models are written in it).
    ternary: bool = False
    linear_norm_eps: float = 1e-6  # where every projection has a norm of its own
    rope_local: RopeConfig | None = None  # of the sliding layers, where it differs
    sliding_window: int | None = None  # tokens that a sliding layer sees, the row's own included
    sliding_layers: tuple[bool, ...] = ()  # a flag a layer; empty: no layer slides
    attention_soft_cap: float = 0.0
    final_soft_cap: float = 0.0
    tied_head: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def is_sliding(self, layer: int) -> bool:
        return bool(self.sliding_layers) and self.sliding_layers[layer]


def config_from_gguf(
    metadata: Metadata, *, vocab_size: int, tied_head: bool, eos_token_ids: Sequence[int]
) -> ModelConfig:
    """From GGUF metadata; `vocab_size` is the number of rows of token_embd.weight. Throws
    FormatError for a missing or senseless value, UnsupportedError for an architecture or option
    that no definition covers."""
    name = Fields(metadata.get, "the metadata").text("general.architecture")
    architecture = check_architecture(GGUF_ALIASES.get(name, name))
    fields = Fields(lambda key: metadata.get(f"{name}.{key}"), "the metadata", f"{name}.")
    num_heads = fields.integer("attention.head_count")
    hidden_size = fields.integer("embedding_length")
    num_layers = fields.integer("block_count", high=MAX_LAYERS)
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    if fields.integer("attention.value_length", head_dim) != head_dim:
        raise _core.UnsupportedError("[load] attention.value_length: differs from key_length")
    window = fields.integer("attention.sliding_window", 0, low=0)
    gemma = architecture == "gemma3"
    sliding = sliding_pattern(num_layers, GEMMA3_PATTERN) if gemma else (True,) * num_layers
    scale_dim = hidden_size // num_heads if gemma and num_layers == GEMMA3_27B_LAYERS else head_dim
    return ModelConfig(
        architecture=architecture,
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
        rope=_gguf_rope(fields),
        rope_local=RopeConfig(
            fields.number("rope.freq_base_swa", GEMMA3_LOCAL_THETA, positive=True)
        )
        if gemma
        else None,
        rope_interleaved=architecture == "llama",
        activation=_gguf_activation(name),
        ternary=architecture == "bitnet" or bool(metadata.get(TERNARY_KEY, False)),
        attention_scale=1.0 / math.sqrt(scale_dim),
        sliding_window=window or None,
        sliding_layers=sliding if window else (),
        attention_soft_cap=fields.number("attn_logit_softcapping", 0.0),
        final_soft_cap=fields.number("final_logit_softcapping", 0.0),
        tied_head=tied_head,
        eos_token_ids=tuple(eos_token_ids),
    )


def check_architecture(architecture: str) -> str:
    known = sorted({*HF_ARCHITECTURES.values(), *GGUF_ALIASES})
    if architecture not in known:
        raise _core.UnsupportedError(
            f"[load] architecture: expected one of {known}, got {architecture!r}"
        )
    return architecture


def gguf_architecture(config: ModelConfig) -> str:
    """What a GGUF file calls the architecture."""
    squared = config.architecture == "bitnet" and config.activation == "relu_squared"
    return "bitnet-b1.58" if squared else config.architecture


def _gguf_activation(name: str) -> str:
    if name == "gemma3":
        return "gelu_tanh"
    return "relu_squared" if name in GGUF_ALIASES else "silu"


def sliding_pattern(num_layers: int, period: int) -> tuple[bool, ...]:
    return tuple((layer + 1) % period != 0 for layer in range(num_layers))


def _gguf_rope(fields: Fields) -> RopeConfig:
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


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """The factor on cos and sin of YaRN (Peng et al. 2023, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

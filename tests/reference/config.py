"""What a reference decoder needs to know about a model, read from GGUF metadata."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import gguf


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding of one kind of layer; pairs (i, i + d/2), or (2i, 2i + 1) if interleaved."""

    dims: int
    theta: float
    scaling: str = "none"  # none, linear, yarn
    factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    interleaved: bool = False


@dataclass(frozen=True)
class DecoderConfig:
    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    local_rope: RopeConfig | None = None
    sliding_window: int | None = None  # tokens seen, the own one included
    sliding_layers: frozenset[int] = field(default_factory=frozenset)
    attention_scale: float = 0.0  # 0: head_dim ** -0.5
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    activation: str = "silu"  # silu, gelu_tanh, relu_squared


_ACTIVATIONS = {"gemma3": "gelu_tanh", "bitnet-b1.58": "relu_squared"}


def gguf_metadata(reader: gguf.GGUFReader) -> dict[str, Any]:
    return {key: value.contents() for key, value in reader.fields.items()}


def config_from_metadata(metadata: dict[str, Any]) -> DecoderConfig:
    """`metadata` maps GGUF keys to values; names of keys are those of the GGUF specification."""
    architecture = metadata["general.architecture"]

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    num_heads = get("attention.head_count")
    head_dim = get("attention.key_length") or get("embedding_length") // num_heads
    num_layers = get("block_count")
    rope = RopeConfig(
        dims=get("rope.dimension_count", head_dim),
        theta=get("rope.freq_base", 10000.0),
        scaling=get("rope.scaling.type", "linear" if get("rope.scaling.factor") else "none"),
        factor=get("rope.scaling.factor", 1.0),
        original_max_position=get("rope.scaling.original_context_length", 0),
        interleaved=architecture == "llama",
    )
    window = get("attention.sliding_window")
    local_rope = None
    sliding_layers: frozenset[int] = frozenset()
    if architecture == "gemma3":
        # Gemma 3 technical report, section 2: five local layers (theta 10k), then a global one.
        local_rope = RopeConfig(dims=rope.dims, theta=10000.0)
        sliding_layers = frozenset(i for i in range(num_layers) if (i + 1) % 6)
    elif window:
        sliding_layers = frozenset(range(num_layers))
    return DecoderConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=get("embedding_length"),
        num_heads=num_heads,
        num_kv_heads=get("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        norm_eps=get("attention.layer_norm_rms_epsilon"),
        rope=rope,
        local_rope=local_rope,
        sliding_window=window,
        sliding_layers=sliding_layers,
        attention_soft_cap=get("attn_logit_softcapping"),
        activation=_ACTIVATIONS.get(architecture, "silu"),
        logits_soft_cap=get("final_logit_softcapping"),
    )

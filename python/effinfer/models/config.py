"""What a decoder-only model is made of."""

import math
from dataclasses import dataclass

MAX_LAYERS = 65536  # no model comes near; a file may say anything


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


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """The factor on cos and sin of YaRN (Peng et al. 2023, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

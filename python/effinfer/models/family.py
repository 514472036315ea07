"""What shared code asks a family of models for."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from effinfer import _core
from effinfer.files.fields import Fields
from effinfer.models.config import ModelConfig

# Modules of a block in Hugging Face folders, and what GGUF files call them.
MODULES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
QK_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}

Shapes = dict[str, tuple[int, ...]]


class Family(ABC):
    """Facts of an architecture, and the graph of its decoder. What is written here holds for most
    decoders; the module of a family has what differs."""

    name: ClassVar[str]  # ModelConfig.architecture
    # What GGUF files call it (general.architecture), and the activation that each name stands for.
    gguf_names: ClassVar[Mapping[str, str]]
    model_types: ClassVar[tuple[str, ...]] = ()  # of config.json
    # `architectures` of config.json that belong to the family whatever their model_type.
    hf_classes: ClassVar[tuple[str, ...]] = ()
    # Operators of the gated MLP by hidden_act of config.json; the first is the default.
    activations: ClassVar[Mapping[str, str]] = {"silu": "silu"}
    rope_theta: ClassVar[float] = 10000.0  # of folders that do not say
    local_rope_theta: ClassVar[float | None] = None  # of sliding layers, where these have their own
    tied_head: ClassVar[bool] = False  # of folders that do not say
    ternary: ClassVar[bool] = False  # every model of the family is
    # GGUF files rotate the pairs (2i, 2i + 1), folders (i, i + dims / 2).
    gguf_interleaved: ClassVar[bool] = False
    modules: ClassVar[Mapping[str, str]] = MODULES
    norm_offset: ClassVar[float] = 0.0  # what the norm weights of folders leave out

    @abstractmethod
    def build(self, config: ModelConfig, weights: _core.WeightSource) -> _core.Graph:
        """The graph; throws InvalidArgumentError for a weight that is missing or does not fit."""

    def sliding_layers(self, num_layers: int, fields: Fields) -> tuple[bool, ...]:
        """A flag a layer: which ones slide, by the keys of a config.json that has a window and no
        `layer_types`."""
        return (True,) * num_layers

    def refine_gguf(self, config: ModelConfig) -> ModelConfig:
        """`config`, as GGUF metadata say, with what the family knows beyond them."""
        return config

    def refine_folder(self, config: ModelConfig, fields: Fields) -> ModelConfig:
        """`config`, as the usual keys of config.json say, with the family's own keys."""
        return config

    def block_weights(self, config: ModelConfig) -> Shapes:
        """Shapes of a block's weights, without the "blk.0." before their GGUF names."""
        hidden, inner = config.hidden_size, config.intermediate_size
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return {
            "attn_norm.weight": (hidden,),
            "attn_q.weight": (q, hidden),
            "attn_k.weight": (kv, hidden),
            "attn_v.weight": (kv, hidden),
            "attn_output.weight": (hidden, q),
            "ffn_norm.weight": (hidden,),
            "ffn_gate.weight": (inner, hidden),
            "ffn_up.weight": (inner, hidden),
            "ffn_down.weight": (hidden, inner),
        }


def qk_norm_weights(config: ModelConfig) -> Shapes:
    """The shapes of norms of every head of q and k."""
    return {
        "attn_q_norm.weight": (config.head_dim,),
        "attn_k_norm.weight": (config.head_dim,),
    }

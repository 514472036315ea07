"""Gemma 3 (Gemma Team 2025)."""

import math
from dataclasses import replace

from effinfer import _core
from effinfer.files.fields import Fields
from effinfer.models.config import ModelConfig
from effinfer.models.decoder import Decoder
from effinfer.models.family import MODULES, QK_NORMS, Family, Shapes, qk_norm_weights

_PERIOD = 6  # one layer in six, the last, is global
_LAYERS_OF_27B = 62  # the size whose queries are scaled by hidden_size / num_heads


class Gemma3(Family):
    name = "gemma3"
    gguf_names = {"gemma3": "gelu_tanh"}
    model_types = ("gemma3", "gemma3_text")
    activations = {"gelu_pytorch_tanh": "gelu_tanh"}
    rope_theta = 1e6
    local_rope_theta = 10000.0
    tied_head = True
    modules = {
        **MODULES,
        **QK_NORMS,
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
    norm_offset = 1.0

    def build(self, config: ModelConfig, weights: _core.WeightSource) -> _core.Graph:
        """Norms before and after each half of a block, normalised heads of q and k, GeGLU,
        embeddings scaled by sqrt(hidden_size), five sliding layers to a global one. The norm
        weights of the source include the one that Hugging Face files leave out."""
        decoder = Decoder(config, weights)
        add, norm = decoder.graph.add, decoder.norm
        x = decoder.embed(scale=math.sqrt(config.hidden_size))
        for layer in range(config.num_layers):
            block = f"blk.{layer}"
            mixed = decoder.attention(layer, norm(x, f"{block}.attn_norm"), qk_norm=True)
            x = add(x, norm(mixed, f"{block}.post_attention_norm"))
            mixed = decoder.gated_mlp(layer, norm(x, f"{block}.ffn_norm"), "gelu_tanh")
            x = add(x, norm(mixed, f"{block}.post_ffw_norm"))
        return decoder.finish(x)

    def sliding_layers(self, num_layers: int, fields: Fields) -> tuple[bool, ...]:
        return _sliding(num_layers, fields.integer("sliding_window_pattern", _PERIOD))

    def refine_gguf(self, config: ModelConfig) -> ModelConfig:
        """GGUF has no key for the period, and none for the scale of queries."""
        if config.sliding_window:
            config = replace(config, sliding_layers=_sliding(config.num_layers, _PERIOD))
        if config.num_layers == _LAYERS_OF_27B:
            scale = 1.0 / math.sqrt(config.hidden_size // config.num_heads)
            config = replace(config, attention_scale=scale)
        return config

    def refine_folder(self, config: ModelConfig, fields: Fields) -> ModelConfig:
        dim = fields.number("query_pre_attn_scalar", config.head_dim, positive=True)
        return replace(config, attention_scale=1.0 / math.sqrt(dim))

    def block_weights(self, config: ModelConfig) -> Shapes:
        hidden = (config.hidden_size,)
        return {
            **super().block_weights(config),
            **qk_norm_weights(config),
            "post_attention_norm.weight": hidden,
            "post_ffw_norm.weight": hidden,
        }


def _sliding(num_layers: int, period: int) -> tuple[bool, ...]:
    return tuple((layer + 1) % period != 0 for layer in range(num_layers))


FAMILIES = (Gemma3(),)

"""Gemma 3 (Gemma Team 2025)."""

import math

from effinfer import _core
from effinfer.models.config import ModelConfig
from effinfer.models.decoder import Decoder


def build_gemma3(config: ModelConfig, weights: _core.WeightSource) -> _core.Graph:
    """Norms before and after each half of a block, normalised heads of q and k, GeGLU, embeddings
    scaled by sqrt(hidden_size), five sliding layers to a global one. The norm weights of the
    source include the one that Hugging Face files leave out."""
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

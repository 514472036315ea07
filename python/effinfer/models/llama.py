"""Llama 2 and 3 (Touvron et al. 2023; Dubey et al. 2024), SmolLM2, Mistral (Jiang et al. 2023)."""

from effinfer import _core
from effinfer.models.config import ModelConfig
from effinfer.models.decoder import Decoder


def build_llama(config: ModelConfig, weights: _core.WeightSource) -> _core.Graph:
    """Pre-norm blocks of grouped-query attention and SwiGLU. Mistral's sliding window and the
    variants of rotary scaling come with `config`."""
    decoder = Decoder(config, weights)
    add = decoder.graph.add
    x = decoder.embed()
    for layer in range(config.num_layers):
        block = f"blk.{layer}"
        x = add(x, decoder.attention(layer, decoder.norm(x, f"{block}.attn_norm")))
        x = add(x, decoder.gated_mlp(layer, decoder.norm(x, f"{block}.ffn_norm"), "silu"))
    return decoder.finish(x)

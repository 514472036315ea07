"""Qwen 2 and 2.5 (Yang et al. 2024), Qwen 3 (Yang et al. 2025)."""

from effinfer import _core
from effinfer.models.config import ModelConfig
from effinfer.models.decoder import Decoder


def build_qwen2(config: ModelConfig, weights: _core.WeightSource) -> _core.Graph:
    """Llama's blocks with biases on q, k and v, which the weights bring along."""
    return _build(config, weights, qk_norm=False)


def build_qwen3(config: ModelConfig, weights: _core.WeightSource) -> _core.Graph:
    """No biases; every head of q and k is normalised before it is rotated."""
    return _build(config, weights, qk_norm=True)


def _build(config: ModelConfig, weights: _core.WeightSource, *, qk_norm: bool) -> _core.Graph:
    decoder = Decoder(config, weights)
    add = decoder.graph.add
    x = decoder.embed()
    for layer in range(config.num_layers):
        block = f"blk.{layer}"
        normed = decoder.norm(x, f"{block}.attn_norm")
        x = add(x, decoder.attention(layer, normed, qk_norm=qk_norm))
        x = add(x, decoder.gated_mlp(layer, decoder.norm(x, f"{block}.ffn_norm"), "silu"))
    return decoder.finish(x)

"""BitNet b1.58 (Ma et al. 2024, arXiv:2402.17764; the 2B4T report, arXiv:2504.12285)."""

from effinfer import _core
from effinfer.models.config import ModelConfig
from effinfer.models.decoder import Decoder


def build_bitnet(config: ModelConfig, weights: _core.WeightSource) -> _core.Graph:
    """Llama's block with ternary projections and a norm before each that leaves a sublayer: of what
    attention mixed, and of the gated product. Squared ReLU in the 2B4T model, SiLU before it."""
    decoder = Decoder(config, weights)
    add = decoder.graph.add
    x = decoder.embed()
    for layer in range(config.num_layers):
        block = f"blk.{layer}"
        h = decoder.norm(x, f"{block}.attn_norm")
        x = add(x, decoder.attention(layer, h, sub_norm=True))
        h = decoder.norm(x, f"{block}.ffn_norm")
        x = add(x, decoder.gated_mlp(layer, h, config.activation, sub_norm=True))
    return decoder.finish(x)

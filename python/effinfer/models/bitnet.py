"""BitNet b1.58 (Ma et al. 2024, arXiv:2402.17764; the 2B4T report, arXiv:2504.12285)."""

from effinfer import _core
from effinfer.models.config import ModelConfig
from effinfer.models.decoder import build_pre_norm
from effinfer.models.family import MODULES, Family, Shapes

# `architectures` of the first checkpoints, which call themselves llama and hold master weights.
FIRST_CLASS = "BitnetForCausalLM"


class BitNet(Family):
    name = "bitnet"
    # bitnet.cpp tells squared ReLU by the name.
    gguf_names = {"bitnet": "silu", "bitnet-b1.58": "relu_squared", "bitnet-25": "relu_squared"}
    model_types = ("bitnet",)
    hf_classes = (FIRST_CLASS,)
    activations = {"relu2": "relu_squared", "silu": "silu"}
    rope_theta = 500000.0
    ternary = True
    modules = {
        **MODULES,
        "self_attn.attn_sub_norm": "attn_sub_norm",
        "mlp.ffn_sub_norm": "ffn_sub_norm",
        "self_attn.inner_attn_ln": "attn_sub_norm",
        "mlp.ffn_layernorm": "ffn_sub_norm",
    }

    def build(self, config: ModelConfig, weights: _core.WeightSource) -> _core.Graph:
        """Llama's block with ternary projections and a norm before each that leaves a sublayer: of
        what attention mixed, and of the gated product. Squared ReLU in the 2B4T model, SiLU before
        it."""
        return build_pre_norm(config, weights, sub_norm=True)

    def block_weights(self, config: ModelConfig) -> Shapes:
        return {
            **super().block_weights(config),
            "attn_sub_norm.weight": (config.num_heads * config.head_dim,),
            "ffn_sub_norm.weight": (config.intermediate_size,),
        }


FAMILIES = (BitNet(),)

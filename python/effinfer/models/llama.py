"""Llama 2 and 3 (Touvron et al. 2023; Dubey et al. 2024), SmolLM2, Mistral (Jiang et al. 2023)."""

from effinfer import _core
from effinfer.models.config import ModelConfig
from effinfer.models.decoder import build_pre_norm
from effinfer.models.family import Family


class Llama(Family):
    name = "llama"
    gguf_names = {"llama": "silu"}
    model_types = ("llama", "mistral")
    gguf_interleaved = True

    def build(self, config: ModelConfig, weights: _core.WeightSource) -> _core.Graph:
        """Pre-norm blocks of grouped-query attention and SwiGLU. Mistral's sliding window and the
        variants of rotary scaling come with `config`."""
        return build_pre_norm(config, weights)


FAMILIES = (Llama(),)

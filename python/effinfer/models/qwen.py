"""Qwen 2 and 2.5 (Yang et al. 2024), Qwen 3 (Yang et al. 2025)."""

from effinfer import _core
from effinfer.files.fields import Fields
from effinfer.models.config import ModelConfig
from effinfer.models.decoder import build_pre_norm
from effinfer.models.family import MODULES, QK_NORMS, Family, Shapes, qk_norm_weights


class _Qwen(Family):
    def sliding_layers(self, num_layers: int, fields: Fields) -> tuple[bool, ...]:
        """Folders state a window also where no layer slides."""
        if not fields.flag("use_sliding_window"):
            return ()
        first = fields.integer("max_window_layers", 0, low=0)
        return tuple(layer >= first for layer in range(num_layers))


class Qwen2(_Qwen):
    name = "qwen2"
    gguf_names = {"qwen2": "silu"}
    model_types = ("qwen2",)

    def build(self, config: ModelConfig, weights: _core.WeightSource) -> _core.Graph:
        """Llama's blocks with biases on q, k and v, which the weights bring along."""
        return build_pre_norm(config, weights)

    def block_weights(self, config: ModelConfig) -> Shapes:
        shapes = super().block_weights(config)
        parts = ("attn_q", "attn_k", "attn_v")
        return {**shapes, **{f"{part}.bias": shapes[f"{part}.weight"][:1] for part in parts}}


class Qwen3(_Qwen):
    name = "qwen3"
    gguf_names = {"qwen3": "silu"}
    model_types = ("qwen3",)
    modules = {**MODULES, **QK_NORMS}

    def build(self, config: ModelConfig, weights: _core.WeightSource) -> _core.Graph:
        """No biases; every head of q and k is normalised before it is rotated."""
        return build_pre_norm(config, weights, qk_norm=True)

    def block_weights(self, config: ModelConfig) -> Shapes:
        return {**super().block_weights(config), **qk_norm_weights(config)}


FAMILIES = (Qwen2(), Qwen3())

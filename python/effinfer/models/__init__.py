"""Model definitions: each architecture is a page that builds a graph."""

from collections.abc import Callable

from effinfer import _core
from effinfer.models.bitnet import build_bitnet
from effinfer.models.config import ModelConfig, check_architecture
from effinfer.models.gemma import build_gemma3
from effinfer.models.llama import build_llama
from effinfer.models.qwen import build_qwen2, build_qwen3

# By ModelConfig.architecture.
ARCHITECTURES: dict[str, Callable[[ModelConfig, _core.WeightSource], _core.Graph]] = {
    "llama": build_llama,
    "qwen2": build_qwen2,
    "qwen3": build_qwen3,
    "gemma3": build_gemma3,
    "bitnet": build_bitnet,
}


def build_graph(config: ModelConfig, weights: _core.WeightSource) -> _core.Graph:
    """The graph of a model. Throws UnsupportedError for an unknown architecture and
    InvalidArgumentError for a weight that is missing or of another shape than `config` says."""
    return ARCHITECTURES[check_architecture(config.architecture)](config, weights)

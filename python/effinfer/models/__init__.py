"""Model definitions: each family is a module that holds its facts and builds its graph."""

from effinfer import _core
from effinfer.models.config import ModelConfig
from effinfer.models.families import FAMILIES, family_of

__all__ = ["FAMILIES", "ModelConfig", "build_graph"]


def build_graph(config: ModelConfig, weights: _core.WeightSource) -> _core.Graph:
    """The graph of a model. Throws UnsupportedError for an unknown architecture and
    InvalidArgumentError for a weight that is missing or of another shape than `config` says."""
    return family_of(config.architecture).build(config, weights)

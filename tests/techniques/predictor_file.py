"""Files of predictors with random weights."""

import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from effinfer import _core
from effinfer.techniques import attention_predictor
from effinfer.techniques.importance import KIND
from tests.reference import tiny

RANK = 24
Arrays = dict[str, np.ndarray]


def random_weights(config: dict[str, Any], channels: int, first: int = 1) -> Arrays:
    rng = np.random.default_rng(11)
    size, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config["num_key_value_heads"]
    dim = config.get("head_dim", size // heads)

    def matrix(rows: int, cols: int) -> np.ndarray:
        return (3 * rng.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float32)

    weights = {"norm": np.ones(size, np.float32), "query": matrix(RANK, size)}
    weights["key"] = matrix(RANK, size)
    for more in range(-(-(config["num_hidden_layers"] - first) // (dim // channels))):
        weights[f"{more}.queries"] = matrix(heads * dim, RANK)
        weights[f"{more}.keys"] = matrix(kv_heads * dim, RANK)
    return weights


def write_predictor(
    path: Path,
    config: dict[str, Any],
    channels: int,
    first: int = 1,
    changed: Mapping[str, Any] | None = None,
) -> Arrays:
    weights = random_weights(config, channels, first)
    writer = _core.GgufWriter(str(path))
    writer.set("general.architecture", "effinfer-heads")
    facts = {"kind": KIND, "count": 1, "hidden_size": config["hidden_size"]}
    facts |= {"vocab_size": config["vocab_size"], "first": first, "channels": channels}
    for key, value in {**facts, **(changed or {})}.items():
        writer.set(f"heads.{key}", value)
    for name, array in weights.items():
        writer.add_tensor(f"{KIND}.{name}.weight", "f32", list(array.shape))
    for array in weights.values():
        writer.write(array)
    writer.commit()
    return weights


@cache
def predictor_of_the_contract() -> str:
    """For the model of contract_model.py."""
    path = Path(tempfile.mkdtemp()) / "predictor.gguf"
    write_predictor(path, tiny.FAMILIES["llama"], channels=8)
    return str(path)


def write_network(
    path: Path, config: dict[str, Any], changed: Mapping[str, Any] | None = None
) -> np.ndarray:
    """Of AttentionPredictor: its weights."""
    weights = np.random.default_rng(12).normal(0, 0.2, attention_predictor.WEIGHTS)
    facts = {"kind": attention_predictor.KIND, "count": 1}
    facts |= {"hidden_size": config["hidden_size"], "vocab_size": config["vocab_size"]}
    writer = _core.GgufWriter(str(path))
    writer.set("general.architecture", "effinfer-heads")
    for key, value in {**facts, **(changed or {})}.items():
        writer.set(f"heads.{key}", value)
    writer.add_tensor(f"{attention_predictor.KIND}.network.weight", "f32", [weights.size])
    writer.write(weights.astype(np.float32))
    writer.commit()
    return weights.astype(np.float32)


@cache
def network_of_the_contract() -> str:
    """For the model of contract_model.py."""
    path = Path(tempfile.mkdtemp()) / "network.gguf"
    write_network(path, tiny.FAMILIES["llama"])
    return str(path)

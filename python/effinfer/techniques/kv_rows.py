"""The keys and values that a model has of a text, of the layers whose pages may be encoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from effinfer import _core
from effinfer.techniques.graph_steps import GraphSteps
from effinfer.techniques.rewrite import prune

if TYPE_CHECKING:
    from effinfer.checkpoints.model_files import ModelFiles
    from effinfer.techniques.key_channels import Floats

LEAST_TOKENS = 256
MOST_TOKENS = 2048
_STEP = 512


def keys_and_values(
    files: ModelFiles, ids: Sequence[int], rotated: bool = False
) -> Iterator[Floats]:
    """Of layers whose pages may be encoded, keys as they are before their rotation, or behind it,
    then values: [tokens, dimensions of all heads], of 2,048 tokens at most. Throws
    InvalidArgumentError for fewer than 256."""
    import numpy as np

    if len(ids) < LEAST_TOKENS:
        raise _core.InvalidArgumentError(
            f"[calibrate] text: expected at least {LEAST_TOKENS} tokens, got {len(ids)}"
        )
    ids = ids[:MOST_TOKENS]
    made = {node["outputs"][0]: node for node in files.graph.nodes}
    names: dict[str, str] = {}
    for append in encoded_layers(files.graph):
        key, value = append["inputs"][:2]
        rotation = made[key]
        if rotation["op"] == "rope" and not rotated:
            key = rotation["inputs"][0]
        layer = append["attributes"]["layer"]
        names |= {key: f"calibrate.k.{layer}", value: f"calibrate.v.{layer}"}
    steps = GraphSteps.of(files, prune(files.graph, names), len(ids))
    text = steps.begin()
    read: dict[str, list[Floats]] = {name: [] for name in names.values()}
    for first in range(0, len(ids), _STEP):
        steps.feed(text, ids[first:][:_STEP])
        for name, parts in read.items():
            parts.append(np.array(steps.executable.output(name)))
    for parts in read.values():
        yield np.concatenate(parts).reshape(len(ids), -1)


def encoded_layers(graph: _core.Graph) -> list[dict[str, Any]]:
    """The nodes that append keys of layers without a window: where all have one, of all layers."""
    windows = {
        node["attributes"]["layer"]: node["attributes"]["window_left"]
        for node in graph.nodes
        if node["op"] == "attention"
    }
    appends = [node for node in graph.nodes if node["op"] == "kv_append"]
    full = [node for node in appends if windows[node["attributes"]["layer"]] < 0]
    return full or appends

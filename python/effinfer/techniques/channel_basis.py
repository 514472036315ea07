"""In which directions a model's keys and values lie, by a text of one's own: bases of the features
that encoded pages may keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from effinfer import _core
from effinfer.techniques.graph_steps import GraphSteps
from effinfer.techniques.rewrite import prune

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from effinfer.checkpoints.model_files import ModelFiles
    from effinfer.techniques.key_channels import Floats

LEAST_TOKENS = 256
MOST_TOKENS = 2048
_STEP = 512
# The first token's keys and values are unlike all others, and every row attends to it.
_FIRST = 30.0


def fit_bases(
    files: ModelFiles, ids: Sequence[int], features: int, shared_layers: int = 1
) -> tuple[int, ...]:
    """Of each layer that is encoded `features` directions of its keys as they are before their
    rotation, and as many of its values, or of so many layers together; as pack() packs them:
    [layers, keys and values, features, dimensions of all KV heads]. Throws InvalidArgumentError for
    a text that is too short, or more features than dimensions."""
    import numpy as np

    if len(ids) < LEAST_TOKENS:
        raise _core.InvalidArgumentError(
            f"[calibrate] text: expected at least {LEAST_TOKENS} tokens, got {len(ids)}"
        )
    numbers = list(_keys_and_values(files, ids[:MOST_TOKENS]))
    found: list[npt.NDArray[np.float64]] = [np.empty(0)] * len(numbers)
    for first in range(0, len(numbers), 2 * shared_layers):
        for kind in range(2):
            places = range(first + kind, min(first + 2 * shared_layers, len(numbers)), 2)
            together = np.concatenate([numbers[place] for place in places], axis=1)
            parts = np.split(_directions_of(together, features), len(places), axis=1)
            for place, part in zip(places, parts, strict=True):
                found[place] = part
    return pack(np.stack(found))


def _directions_of(numbers: Floats, features: int) -> npt.NDArray[np.float64]:
    if features > numbers.shape[1]:
        raise _core.InvalidArgumentError(
            f"[calibrate] features: expected at most {numbers.shape[1]}, which the KV heads of the "
            f"layers that share them have together, got {features}"
        )
    return directions(numbers, features)


def directions(numbers: Floats, count: int) -> npt.NDArray[np.float64]:
    """Orthonormal rows that hold most of the squares of [tokens, dimensions]."""
    import numpy as np

    rows = numbers.astype(np.float64)
    rows[0] *= _FIRST
    _, vectors = np.linalg.eigh(rows.T @ rows)  # ascending
    most: npt.NDArray[np.float64] = vectors[:, ::-1][:, :count].T
    return most


def pack(bases: npt.NDArray[np.floating]) -> tuple[int, ...]:
    """In bfloat16, four of them in an integer, the first in its lowest bits."""
    import numpy as np

    bits = np.ascontiguousarray(bases, "<f4").view("<u4").ravel()
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return tuple(rounded.astype("<u2").view("<i8").tolist())


def _keys_and_values(files: ModelFiles, ids: Sequence[int]) -> Iterator[Floats]:
    """Of layers that are encoded, keys, then values: [tokens, dimensions of all heads]."""
    import numpy as np

    made = {node["outputs"][0]: node for node in files.graph.nodes}
    names: dict[str, str] = {}
    for append in _encoded(files.graph):
        key, value = append["inputs"][:2]
        rotation = made[key]
        if rotation["op"] == "rope":
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


def _encoded(graph: _core.Graph) -> list[dict[str, Any]]:
    """The nodes that append keys of layers without a window: where all have one, of all layers."""
    windows = {
        node["attributes"]["layer"]: node["attributes"]["window_left"]
        for node in graph.nodes
        if node["op"] == "attention"
    }
    appends = [node for node in graph.nodes if node["op"] == "kv_append"]
    full = [node for node in appends if windows[node["attributes"]["layer"]] < 0]
    return full or appends

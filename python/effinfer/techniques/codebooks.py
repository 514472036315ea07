"""Codebooks of 256 vectors of 4 dimensions for a model's keys and values, by a text of one's
own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from effinfer.techniques.channel_basis import pack
from effinfer.techniques.kv_rows import encoded_layers, keys_and_values

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from effinfer import _core
    from effinfer.checkpoints.model_files import ModelFiles
    from effinfer.techniques.key_channels import Floats

DIMS, VECTORS = 4, 256
_ROUNDS = 8
# The first token's keys and values are unlike all others, and every row attends to it.
_FIRST = 900.0


def fit_codebooks(files: ModelFiles, ids: Sequence[int]) -> tuple[int, ...]:
    """Of each layer that is encoded codebooks of its keys as they are before their rotation, with
    both dimensions of the pairs that it turns, and of its values; as pack() packs them: [layers,
    keys and values, KV heads, head_dim / 4, 256, 4]. Throws InvalidArgumentError for a text that is
    too short."""
    import numpy as np

    found = []
    for number, rows in enumerate(keys_and_values(files, ids)):
        append = encoded_layers(files.graph)[number // 2]
        heads, dim = (append["attributes"][name] for name in ("heads", "head_dim"))
        vectors = rows.reshape(len(rows), heads, dim)
        if number % 2 == 0:
            vectors = vectors[:, :, key_order(files.graph, append)]
        found += [fit(vectors[:, head].reshape(len(rows), -1, DIMS)) for head in range(heads)]
    return pack(np.stack(found))


def fit(vectors: Floats) -> Floats:
    """Of [tokens, codebooks, 4] the centroids of k-means, [codebooks, 256, 4]: expectation and
    maximisation in turns, from tokens drawn at random on."""
    import numpy as np

    count, books = vectors.shape[:2]
    random = np.random.default_rng(0)
    centres = vectors[random.permutation(count)[np.arange(VECTORS) % count]].swapaxes(0, 1).copy()
    centres[:, 0] = vectors[0]
    weights = np.ones((count, 1))
    weights[0] = _FIRST
    for _ in range(_ROUNDS):
        own = nearest(vectors, centres) + VECTORS * np.arange(books)

        def sums(numbers: npt.NDArray[Any], own: npt.NDArray[np.intp] = own) -> npt.NDArray[Any]:
            return np.bincount(own.ravel(), numbers.ravel(), books * VECTORS)

        total = sums(np.broadcast_to(weights, own.shape))
        means = np.stack([sums(weights * vectors[:, :, d]) for d in range(DIMS)], axis=-1)
        used = total > 0
        centres.reshape(-1, DIMS)[used] = means[used] / total[used, None]
    found: Floats = centres
    return found


def nearest(vectors: Floats, centres: Floats) -> npt.NDArray[np.intp]:
    """The number of each one's nearest centre: [tokens, codebooks]."""
    import numpy as np

    squares = (centres**2).sum(-1) / 2
    near = [
        np.argmax(vectors[:, book] @ centres[book].T - squares[book], axis=1)
        for book in range(len(centres))
    ]
    return np.stack(near, axis=1)


def key_order(graph: _core.Graph, append: dict[str, Any]) -> list[int]:
    """The dimensions of a head's keys, so that those of a pair that is turned are neighbours."""
    made = {node["outputs"][0]: node for node in graph.nodes}
    dim = append["attributes"]["head_dim"]
    rotation = made[append["inputs"][0]]
    if rotation["op"] != "rope":
        return list(range(dim))
    turned = made[rotation["inputs"][1]]["attributes"]["dims"]
    if rotation["attributes"]["interleaved"]:
        return list(range(dim))
    pairs = [d for pair in range(turned // 2) for d in (pair, pair + turned // 2)]
    return pairs + list(range(turned, dim))

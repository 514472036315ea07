"""Random trees of drafts, and what they leave in a cache."""

import numpy as np

from effinfer import _core

PAGE = 64
SIZES = {"f32": 4, "f16": 2, "bf16": 2, "i8": 1}


def keys_and_values(
    cache: _core.KvCache, sequence: int, layers: int, head_dim: int, dtype: str
) -> np.ndarray:
    """The bytes of a sequence, [layers, K and V, kv_heads, tokens, head bytes] (kv_layout.h)."""
    size = SIZES[dtype]
    pack = 4 // size
    length, pages = cache.length(sequence), cache.pages(sequence)
    out = []
    for layer in range(layers):
        k = np.stack([cache.k_page(layer, page) for page in pages], 1)
        v = np.stack([cache.v_page(layer, page) for page in pages], 1)
        heads = k.shape[0]
        k = k.reshape(heads, -1, 4, head_dim // pack, 16, 4).transpose(0, 1, 2, 4, 3, 5)
        v = v.reshape(heads, -1, PAGE // pack, head_dim, pack, size).transpose(0, 1, 2, 4, 3, 5)
        out.append([x.reshape(heads, -1, head_dim * size)[:, :length] for x in (k, v)])
    return np.array(out)


def random_parents(rng: np.random.Generator, rows: int) -> list[int]:
    """A chain, a star, a bush, or a first path with branches."""
    kind = int(rng.integers(4))
    least = {0: lambda i: i - 1, 1: lambda i: min(i - 1, 0), 2: lambda i: -1}
    if kind < 3:
        return [int(rng.integers(least[kind](i), i)) if i else -1 for i in range(rows)]
    path = rows // 3 + 1
    return [i - 1 if i < path else int(rng.integers(-1, i)) for i in range(rows)]


def paths_of(parents: list[int]) -> list[list[int]]:
    paths: list[list[int]] = []
    for i, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), i])
    return paths


def stays(context: int, path: list[int]) -> bool:
    """Whether each token lies on the page of its depth."""
    return all((context + i) // PAGE == (context + k) // PAGE for k, i in enumerate(path))

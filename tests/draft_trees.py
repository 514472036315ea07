"""Random trees of drafts, and what they leave in a cache."""

from collections.abc import Callable

import numpy as np

from effinfer import _core

PAGE = 64
SIZES = {"f32": 4, "f16": 2, "bf16": 2, "i8": 1}


def keys_and_values(
    cache: _core.KvCache,
    sequence: int,
    layers: int,
    head_dim: int,
    dtype: str,
    full_layers: tuple[int, ...] | None = None,
) -> np.ndarray:
    """The bytes of a sequence, [layers, K and V, kv_heads, tokens, head bytes] (kv_layout.h).

    full_layers: those without a window, where others free theirs; zeros for what is freed."""
    size = SIZES[dtype]
    pack = 4 // size
    length = cache.length(sequence)
    out = []
    for layer in range(layers):
        group = 0 if full_layers is None or layer in full_layers else 1
        pages = cache.pages(sequence, group)
        gone = (length - cache.slots(sequence, group)) // PAGE

        def view(page: Callable[[int, int], np.ndarray], layer: int = layer) -> np.ndarray:
            nothing = np.zeros_like(page(layer, 0))
            held = [page(layer, i) if i >= 0 else nothing for i in pages]  # noqa: B023
            return np.stack([nothing] * gone + held, 1)  # noqa: B023

        k, v = view(cache.k_page), view(cache.v_page)
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

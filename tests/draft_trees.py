"""Random trees of drafts."""

import numpy as np

PAGE = 64


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

"""Which keys of a head are alike: enough to become one, or to be visited together."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


def matches(keys: npt.NDArray[np.float32], chunk: int, count: int) -> npt.NDArray[np.int64]:
    """Of keys [n, dim], n whole chunks, into which each goes: itself, but for the `count` best."""
    import numpy as np

    units = keys / np.maximum(np.linalg.norm(keys, axis=1, keepdims=True), 1e-30)
    chunks = units.reshape(-1, chunk, keys.shape[1])
    cosines = chunks[:, ::2] @ chunks[:, 1::2].transpose(0, 2, 1)
    slots = np.arange(len(keys)).reshape(-1, chunk)
    found = np.take_along_axis(slots[:, 1::2], cosines.argmax(axis=2), axis=1).ravel()
    best = np.argsort(-cosines.max(axis=2).ravel(), kind="stable")[:count]
    into = np.arange(len(keys))
    into[slots[:, ::2].ravel()[best]] = found[best]
    return into


def clusters(
    keys: npt.NDArray[np.float32],
    counts: npt.NDArray[np.float32],
    fewer: int,
    rng: np.random.Generator,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Of keys [n, dim], `fewer` of which are nearest to an earlier one and join the nearest that
    stays: a slot of each cluster, drawn by how often it counts, ascending, and sums of counts."""
    import numpy as np

    squares = (keys * keys).sum(axis=1)
    apart = squares[:, None] + squares - 2 * (keys @ keys.T)  # squared distances
    earlier = np.where(np.tri(len(keys), k=-1, dtype=bool), apart, np.inf).min(axis=1)
    stays = np.ones(len(keys), dtype=bool)
    stays[np.argsort(earlier, kind="stable")[:fewer]] = False
    centres = np.flatnonzero(stays)
    cluster = np.where(stays, np.cumsum(stays) - 1, apart[:, centres].argmin(axis=1))
    # The greatest of log(u) / count is each slot's by its share of the counts.
    order = np.lexsort((np.log(rng.random(len(keys))) / counts, cluster))
    last = np.searchsorted(cluster[order], np.arange(len(centres)), side="right") - 1
    sums = np.zeros(len(centres))
    np.add.at(sums, cluster, counts)
    drawn = order[last].astype(np.int64)
    ascending = np.argsort(drawn)
    return drawn[ascending], sums[ascending]


def halved(keys: npt.NDArray[np.float32], unit: int) -> npt.NDArray[np.int32]:
    """Keys [n, dim], n a multiple of `unit`: their numbers, each `unit` of them a cluster, and what
    is alike beside each other. A cluster is halved, in whole units, where its keys along the
    direction in which they differ most have their median: what 2-means of halves comes to."""
    import numpy as np

    order = np.arange(len(keys), dtype=np.int32)
    parts = [(0, len(keys))]
    while parts:
        begin, end = parts.pop()
        if end - begin <= unit:
            continue
        own = order[begin:end]
        rest = keys[own] - keys[own].mean(0)
        axis = _principal(rest)
        order[begin:end] = own[np.argsort(rest @ axis, kind="stable")]
        middle = begin + (end - begin) // unit // 2 * unit
        parts += [(begin, middle), (middle, end)]
    return order


def _principal(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Nearly the direction in which they are longest: a few steps of power iteration."""
    import numpy as np

    axis: npt.NDArray[np.float32] = rows[(rows * rows).sum(1).argmax()]
    for _ in range(6):
        axis = rows.T @ (rows @ axis)
        axis = axis / max(float(np.linalg.norm(axis)), 1e-30)
    return axis

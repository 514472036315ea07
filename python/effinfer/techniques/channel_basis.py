"""In which directions a model's keys and values lie, by a text of one's own: bases of the features
that encoded pages may keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from effinfer import _core
from effinfer.techniques.kv_rows import keys_and_values

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from effinfer.checkpoints.model_files import ModelFiles
    from effinfer.techniques.key_channels import Floats

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

    numbers = list(keys_and_values(files, ids))
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

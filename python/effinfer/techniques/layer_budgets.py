"""How many keys each layer keeps of one budget for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PAGE = 64


def budgets_by_layer(scores: npt.NDArray[np.float32], budget: int, window: int) -> list[int]:
    """By [layers, KV heads, slots]: the r-th keys of a layer's heads are worth what they have on
    average, and the most valuable of all layers stay (KVCompose, section 3), a page of them at a
    time, so that what is dropped are whole pages. Layers together keep at most `budget` times their
    number and less than a page fewer, and each its last `window` keys with what fills their page;
    where that is `budget` already, all keep as many."""
    import numpy as np

    layers, _, size = scores.shape
    least = size - (size - window) // PAGE * PAGE
    if least >= budget:
        return [budget] * layers
    ranked = -np.sort(-scores[:, :, : size - window], axis=2).mean(axis=1)
    pages = ranked[:, least - window :].reshape(layers, -1, PAGE).sum(axis=2)
    count = (budget - least) * layers // PAGE
    best = np.argsort(-pages, axis=None, kind="stable")[:count]
    counts: list[int] = (
        least + PAGE * np.bincount(best // pages.shape[1], minlength=layers)
    ).tolist()
    return counts

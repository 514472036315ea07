"""How widely the attention of a model's layers is spread, by a text of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from effinfer import _core
from effinfer.techniques.key_channels import LEAST_TOKENS, queries_and_keys

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from effinfer.checkpoints.model_files import ModelFiles
    from effinfer.techniques.key_channels import Floats

WINDOW, STRIDE = 32, 16  # keys whose means are compared: as `page_index` takes them
MOST_TOKENS = 512  # one step
ASKED = 64  # last rows of the text


def spreads(files: ModelFiles, ids: Sequence[int]) -> list[float]:
    """Of each attention node the number of windows of keys that would hold its queries' attention
    evenly: e to the power of the entropy of what the means of windows get, on average over rows and
    heads. Throws InvalidArgumentError for a text that is too short."""
    import numpy as np

    if len(ids) < LEAST_TOKENS:
        raise _core.InvalidArgumentError(
            f"[calibrate] text: expected at least {LEAST_TOKENS} tokens, got {len(ids)}"
        )
    nodes = [node["attributes"] for node in files.graph.nodes if node["op"] == "attention"]
    layers = queries_and_keys(files, ids[:MOST_TOKENS])
    return [
        float(np.exp(entropies(q, k, facts["sm_scale"]).mean()))
        for facts, (q, k) in zip(nodes, layers, strict=True)
    ]


def shared_pages(average: int, spread: Sequence[float]) -> list[int]:
    """Of layers with the ratios `spread`, whole pages of each, `average` of those above 0."""
    total = sum(spread)
    if not total:
        return []
    pages = average * sum(each > 0 for each in spread)
    ends = [round(pages * part / total) for part in accumulate(spread)]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def entropies(q: Floats, k: Floats, sm_scale: float) -> npt.NDArray[np.float64]:
    """In nats, of the last rows' attention to the means of the windows before them:
    [rows, KV heads, query heads of one]."""
    import numpy as np

    rows = q[-ASKED:].astype(np.float64)
    starts = range(0, len(k) - ASKED - WINDOW + 1, STRIDE)
    means = np.stack([k[start:][:WINDOW].astype(np.float64).mean(0) for start in starts])
    logits = np.einsum("thgd,whd->thgw", rows, means) * sm_scale
    logits -= logits.max(-1, keepdims=True)
    weights = np.exp(logits)
    total = weights.sum(-1)
    found: npt.NDArray[np.float64] = np.log(total) - (weights * logits).sum(-1) / total
    return found

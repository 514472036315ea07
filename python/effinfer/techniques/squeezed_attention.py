"""Squeezed Attention: Accelerating Long Context Length LLM Inference (Hooper et al.,
arXiv:2411.09688).

Many questions are asked about one fixed context. Its keys are clustered once, for each KV head, and
a generated token compares itself with the clusters' means alone: it visits the keys of those that
are likely to matter (section 3). Here the slots of a head lie in the order of its clusters, 16 keys
of one behind each other, as page_index takes means of 16 neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from effinfer.techniques.clusters import halved
from effinfer.techniques.ranges import integer
from effinfer.techniques.setup import EngineSetup, Hook
from effinfer.techniques.sparse_decode import PAGE, SparseDecode, sparse_decode
from effinfer.techniques.technique import Meta

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from effinfer import _core

UNIT = 16
_CONTEXTS = 8  # whose orders are kept


@dataclass(frozen=True)
class SqueezedAttention(SparseDecode):
    """
    Args:
        context: tokens at the beginning of prompts that are clustered, as far as they fill pages,
            and once for all prompts that have them; 0: the whole of each prompt.
    """

    META: ClassVar[Meta] = replace(
        sparse_decode(
            "Squeezed Attention: Accelerating Long Context Length LLM Inference",
            "2411.09688",
            "clusters of 16 keys each, by halving along the direction in which keys differ most, "
            "in place of k-means by cosines; as many keys as the budget has in place of a "
            "threshold; one level of clusters; what is behind the context is chosen by means of "
            "neighbours; questions read all keys, generated tokens choose; each request has a copy "
            "of the context's keys",
        ),
        primitives=("visits", "residency", "hooks"),
        exclusive=("decode.visits", "kv.resident"),
        python_steps=True,
    )

    context: int = integer(0)

    def index(self, layer: int, kv_heads: int) -> tuple[str, dict[str, Any]]:
        return "page_index", {"score": "means", "unit": UNIT}

    def engine(self, setup: EngineSetup) -> None:
        setup.hooks.append(Hook(self.name, {"prompt_end": 1}, _Contexts(self).cluster))


@dataclass
class _Contexts:
    """The orders of the slots that are clustered, by their tokens."""

    method: SqueezedAttention
    orders: dict[tuple[int, ...], npt.NDArray[np.int32]] = field(default_factory=dict)

    def cluster(self, _: _core.StepEvent, sequence: _core.SequenceState) -> None:
        import numpy as np

        size = sequence.length
        end = min(self.method.context or size, size) // PAGE * PAGE
        if size <= self.method.budget or end <= PAGE:
            return
        tokens = tuple(sequence.tokens(size)[:end])
        order = self.orders.pop(tokens, None)
        if order is None:
            heads = range(sequence.num_heads)
            keys = (sequence.keys(head)[PAGE:end] for head in heads)
            order = np.stack([PAGE + halved(each, UNIT) for each in keys])
        self.orders[tokens] = order
        if len(self.orders) > _CONTEXTS:
            del self.orders[next(iter(self.orders))]  # the one that was asked for the longest ago
        slots = np.tile(np.arange(size, dtype=np.int32), (len(order), 1))
        slots[:, PAGE:end] = order
        sequence.reorder(slots)

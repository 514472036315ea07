"""SubGen: Token Generation in Sublinear Time and Memory (Zandieh et al., arXiv:2402.06082).

Keys of a head come in few clusters. Each cluster keeps one of its keys, drawn uniformly, with its
value, which counts as often as the cluster has keys: sums of exponentials, and so attention, are
those of all keys on average, and off by no more than the clusters are wide (section 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from effinfer import _core
from effinfer.techniques.clusters import clusters
from effinfer.techniques.ranges import integer
from effinfer.techniques.setup import hook
from effinfer.techniques.technique import Meta, Technique
from effinfer.techniques.weights import with_weights

COUNTS = "subgen.counts"


@dataclass(frozen=True)
class SubGen(Technique):
    """
    Args:
        budget: slots that stay, with the last ones.
        recent: of the last tokens, slots that stay as they are.
        stride: slots that go at a time.
        seed: of what clusters draw.
        chunk_tokens: where steps of a prompt end, and slots go.
    """

    META: ClassVar[Meta] = Meta(
        paper="SubGen: Token Generation in Sublinear Time and Memory",
        arxiv="2402.06082",
        family="kv.merging",
        primitives=("weights", "residency", "hooks"),
        effect="approximate",
        needs=("attention",),
        exclusive=("kv.resident", "attention.weights"),
        dense_limit={"budget": 1 << 30},
        differs="how near keys of a cluster are follows from the budget; one key of a cluster "
        "stands for its sum and for its values, which the paper draws apart, by their norms",
        python_steps=True,
        name="subgen",
    )

    budget: int = integer(1024, least=1)
    recent: int = integer(128)
    stride: int = integer(64, least=1)
    seed: int = integer(0)
    chunk_tokens: int = integer(512, least=64, keyword=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        least = self.recent + self.stride + 1
        if self.budget < least:
            raise _core.InvalidArgumentError(
                f"[SubGen] budget: expected at least {least} (recent, stride and 1), "
                f"got {self.budget}"
            )

    def facts(self) -> dict[str, str | int]:
        return {"weights": COUNTS, "chunk_tokens": self.chunk_tokens}

    def graph(self, graph: _core.Graph) -> _core.Graph:
        return with_weights(graph, COUNTS)

    @hook(when="over_budget", tokens="budget")
    def cluster(self, _: _core.StepEvent, sequence: _core.SequenceState) -> None:
        import numpy as np

        size, end = sequence.length, sequence.length - self.recent
        count = -(-(size - self.budget) // self.stride) * self.stride
        counts, lists = sequence.plane(COUNTS), []
        rng = np.random.default_rng([self.seed, sequence.next_position])
        for head, row in enumerate(counts):
            drawn, sums = clusters(sequence.keys(head)[:end], np.exp(row[:end]), count, rng)
            row[drawn] = np.log(sums)
            lists.append([*drawn.tolist(), *range(end, size)])
        sequence.set_plane(COUNTS, counts)
        sequence.retain(lists)

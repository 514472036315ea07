"""Chelsea: Efficient Long-Context LLM Inference via KV Cache Clustering
(Hu et al., arXiv:2506.11418).

Keys that stand near each other in a text are alike. In each chunk every second key looks for the
one among the others that is most like it (chunked soft matching), and the best matches become one
key and one value, their means, which count as often as there are tokens in them:

    chunk    a b a b a b a b     each a finds a b, by cosine; several may find the same
    merged     b a b   b   b     the best matches went into their b
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from effinfer import _core
from effinfer.techniques.clusters import matches
from effinfer.techniques.ranges import choice, integer
from effinfer.techniques.setup import hook
from effinfer.techniques.technique import Meta, Technique
from effinfer.techniques.weights import with_weights

COUNTS = "chelsea.counts"


@dataclass(frozen=True)
class Chelsea(Technique):
    """
    Args:
        budget: slots that stay, with the first and the last ones.
        sinks, recent: of the first and the last tokens, slots that stay as they are.
        stride: slots that go at a time.
        chunk: slots within which keys are matched.
        chunk_tokens: where steps of a prompt end, and slots go.
    """

    META: ClassVar[Meta] = Meta(
        paper="Efficient Long-Context LLM Inference via KV Cache Clustering",
        arxiv="2506.11418",
        family="kv.merging",
        primitives=("weights", "residency", "hooks"),
        effect="approximate",
        needs=("attention",),
        exclusive=("kv.resident", "attention.weights"),
        dense_limit={"budget": 1 << 30},
        differs="the first tokens stay; slots go where there are more than the budget, within "
        "prompts too, and what was merged may be merged again",
        python_steps=True,
        name="chelsea",
    )

    budget: int = integer(1024, least=1)
    sinks: int = integer(4)
    recent: int = integer(128)
    stride: int = integer(64, least=1)
    chunk: int = choice(64, tuple(range(2, 257, 2)))
    chunk_tokens: int = integer(512, least=64, keyword=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        least = self.sinks + self.recent + self.stride + self.chunk
        if self.budget < least:
            raise _core.InvalidArgumentError(
                f"[Chelsea] budget: expected at least {least} (sinks, recent, stride and chunk), "
                f"got {self.budget}"
            )

    def facts(self) -> dict[str, str | int]:
        return {"weights": COUNTS, "chunk_tokens": self.chunk_tokens}

    def graph(self, graph: _core.Graph) -> _core.Graph:
        return with_weights(graph, COUNTS)

    @hook(when="over_budget", tokens="budget")
    def merge(self, _: _core.StepEvent, sequence: _core.SequenceState) -> None:
        import numpy as np

        excess = sequence.length - self.budget
        left = -(-excess // self.stride) * self.stride
        heads = len(sequence.plane(COUNTS))
        while left > 0:  # no more than every second slot goes at once
            end = sequence.length - self.recent
            end -= (end - self.sinks) % self.chunk
            count = min(left, (end - self.sinks) // 2)
            into = np.tile(np.arange(sequence.length), (heads, 1))
            for head in range(heads):
                keys = sequence.keys(head)[self.sinks : end]
                into[head, self.sinks : end] = self.sinks + matches(keys, self.chunk, count)
            sequence.merge_slots(into, COUNTS)
            left -= count

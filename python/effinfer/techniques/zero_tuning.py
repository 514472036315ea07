"""ZeroTuning: Unlocking the Initial Token's Power to Enhance Large Language Models Without Training
(Han et al., arXiv:2505.11739).

The first token gets much of a head's attention and says little: attention to it, times a factor
before all is normalised again, makes the head look at the others more, or less (section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from effinfer import _core
from effinfer.techniques.ranges import integer
from effinfer.techniques.rewrite import rewrite
from effinfer.techniques.technique import Meta, Technique

if TYPE_CHECKING:
    from effinfer.graph import GraphBuilder, Value


@dataclass(frozen=True)
class ZeroTuning(Technique):
    """
    Args:
        percent: what attention to the first token is multiplied by; 100: as it is.
        heads: pairs of a layer and a query head whose attention it is; none: all of them, but
            of layers with a window, which soon see the first token no more.
    """

    META: ClassVar[Meta] = Meta(
        paper="ZeroTuning: Unlocking the Initial Token's Power to Enhance Large Language Models "
        "Without Training",
        arxiv="2505.11739",
        family="attention.weights",
        primitives=("weights",),
        effect="approximate",
        needs=("attention",),
        exclusive=("attention.weights",),
        dense_limit={"percent": 100},
        differs="which heads and how much is searched on examples that the caller scores; heads "
        "are not told apart by how they react first",
        name="zero_tuning",
    )

    percent: int = integer(80, least=1)
    heads: tuple[tuple[int, int], ...] = ()

    def facts(self) -> dict[str, str | int]:
        return {"weights": f"{self.name}.counts"}

    def graph(self, graph: _core.Graph) -> _core.Graph:
        known = set(self.heads)
        plane = (
            f"{self.name}.counts"  # of its requests, zeros: others' first tokens stay as they are
        )

        def tune(builder: GraphBuilder, node: dict[str, Any], inputs: list[Value]) -> Value | None:
            facts = node["attributes"]
            if node["op"] != "attention" or facts["window_left"] >= 0:
                return None
            pairs = [(facts["layer"], head) for head in range(facts["heads"])]
            known.difference_update(pairs)
            chosen = [not self.heads or pair in self.heads for pair in pairs]
            if not any(chosen):
                return None
            percents = [self.percent if each else 100 for each in chosen]
            tuned = {**facts, "weights": plane, "first_percent": percents}
            return builder.node("attention", *inputs, **tuned)

        made = rewrite(graph, tune)
        if known:
            raise _core.InvalidArgumentError(
                f"[ZeroTuning] heads: expected layers without a window and query heads of the "
                f"model, got {min(known)}"
            )
        return made

    def search(
        self, score: Callable[[ZeroTuning], float], percents: Iterable[int] = (50, 80, 125, 200)
    ) -> ZeroTuning:
        """The one of these factors, and of none, with the highest score, which the caller takes of
        a model with it: the share of right answers to some questions, say."""
        tried = [replace(self, percent=percent) for percent in (100, *percents)]
        return max(tried, key=score)

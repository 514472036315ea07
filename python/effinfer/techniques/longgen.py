"""A Little Goes a Long Way: Efficient Long Context Training and Inference with Partial Contexts
(LongGen, Ge et al., arXiv:2410.01485).

The layers in the middle, a third of them, see all keys. The others see a window of the newest keys
and perhaps the first few, and what is farther away comes to them through the middle (section 2).
Pages of keys that a window has left behind are free again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from effinfer import _core
from effinfer.techniques.layers import num_layers
from effinfer.techniques.rewrite import rewrite
from effinfer.techniques.technique import Meta

if TYPE_CHECKING:
    from effinfer.graph import GraphBuilder, Value


@dataclass(frozen=True)
class LongGen:
    """`LLM(model, layers=LongGen(window=1024))`.

    Args:
        window: keys that a token sees in the outer layers, its own included.
        sinks: first keys that it sees there, too. With some, no pages become free.
        share: of the layers that see all keys, in the middle.
    """

    META: ClassVar[Meta] = Meta(
        paper="A Little Goes a Long Way: Efficient Long Context Training and Inference with "
        "Partial Contexts",
        arxiv="2410.01485",
        family="attention.pattern",
        primitives=("graph",),
        effect="trained",
        needs=("attention",),
        differs="its windows, not its strided blocks; no first keys by default, as the cache then "
        "keeps all pages",
        name="longgen",
    )

    window: int = 1024
    sinks: int = 0
    share: float = 1 / 3

    def apply(self, graph: _core.Graph) -> _core.Graph:
        """Throws InvalidArgumentError for a value out of its range, UnsupportedError for a model
        some of whose layers have a window."""
        for name, is_right, expected in (
            ("window", self.window >= 1, "at least 1"),
            ("sinks", self.sinks >= 0, "at least 0"),
            ("share", 0 <= self.share <= 1, "0 to 1"),
        ):
            if not is_right:
                raise _core.InvalidArgumentError(
                    f"[LongGen] {name}: expected {expected}, got {getattr(self, name)!r}"
                )
        layers = num_layers(graph)
        count = round(layers * self.share)
        first = (layers - count) // 2

        def see(builder: GraphBuilder, node: dict[str, Any], inputs: list[Value]) -> Value | None:
            facts = node["attributes"]
            if node["op"] != "attention":
                return None
            if facts["window_left"] >= 0:
                raise _core.UnsupportedError(
                    f"[LongGen] {graph.name}: expected layers without a window, got one of "
                    f"{facts['window_left'] + 1} keys in layer {facts['layer']}"
                )
            if first <= facts["layer"] < first + count:
                return None
            facts = {**facts, "window_left": self.window - 1, "sink_tokens": self.sinks}
            return builder.node("attention", *inputs, **facts)

        return rewrite(graph, see)

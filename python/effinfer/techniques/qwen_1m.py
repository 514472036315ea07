"""Qwen2.5-1M Technical Report (Yang et al., arXiv:2501.15383), section 5.1: dual chunk attention
(An et al., arXiv:2402.17463) with YaRN's temperature (Peng et al., arXiv:2309.00071).

Keys stand at their places p mod s in chunks of s tokens, queries at a place for each kind of chunk,
so that no distance is beyond the context c that the model was trained with:

    key, and query for its own chunk     p mod s
    query for the chunk before           min(p mod s + s, c - 1)
    query for older chunks               c - 1
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from effinfer import _core
from effinfer.techniques.ranges import integer
from effinfer.techniques.rewrite import prune, rewrite
from effinfer.techniques.technique import Meta, Technique

if TYPE_CHECKING:
    from effinfer.graph import GraphBuilder, Value


@dataclass(frozen=True)
class Qwen1M(Technique):
    """
    Args:
        factor: how many times as long texts may become.
        chunk: tokens, a multiple of 256; 0: three quarters of the context.
        context: tokens that the model was trained with; 0: its context.
        temperature: whether logits grow with the texts, from the context on.
    """

    META: ClassVar[Meta] = Meta(
        paper="Qwen2.5-1M Technical Report",
        arxiv="2501.15383",
        family="attention.positions",
        primitives=("key_chunks",),
        effect="approximate",
        needs=("attention",),
        exclusive=("prefill.visits", "decode.visits", "kv.resident"),
        dense_limit={"chunk": 1 << 30, "temperature": False},
        differs="without its sparse prefill; a row's temperature is that of its own position, so "
        "that no row depends on later ones; layers with a window stay as they are",
        name="qwen_1m",
    )

    factor: int = integer(4, least=1)
    chunk: int = integer(0)
    context: int = integer(0)
    temperature: bool = True

    def facts(self) -> dict[str, str | int]:
        return {"key_chunks": True}

    def graph(self, graph: _core.Graph) -> _core.Graph:
        """Throws UnsupportedError for a model without rope."""
        context = self.context or int(graph.metadata["context_length"])
        chunk = self.chunk or max(context * 3 // 1024, 1) * 256
        if chunk % 256:
            wrong = f"[Qwen1M] chunk: expected a multiple of 256, got {chunk}"
            raise _core.InvalidArgumentError(wrong)
        roles = _roles(graph)
        key, last = {"period": chunk}, {"most": context - 1}
        own = key | ({"tempered_from": context} if self.temperature else {})
        maps = (key, own, own | last | {"shift": chunk}, own | last | {"shift": context - 1})
        tables: dict[str, list[Value]] = {}
        queries: dict[str, list[Value]] = {}

        def place(builder: GraphBuilder, node: dict[str, Any], inputs: list[Value]) -> Value | None:
            (name,), facts = node["outputs"], node["attributes"]
            if node["op"] == "rope_table":
                tables[name] = [builder.node("rope_table", *inputs, **facts | m) for m in maps]
            elif name in roles:
                key, *others = tables[node["inputs"][1]]
                of_role = others if roles[name] == "query" else [key]
                queries[name] = [builder.node("rope", inputs[0], t, **facts) for t in of_role]
                return queries[name][0]
            elif node["op"] == "attention" and facts["window_left"] < 0:
                more = queries[node["inputs"][0]][1:]
                return builder.node("attention", *inputs, *more, **facts | {"chunk": chunk})
            return None

        entries = {"context_length": int(graph.metadata["context_length"]) * self.factor}
        return prune(rewrite(graph, place, entries))


def _roles(graph: _core.Graph) -> dict[str, str]:
    """What rope makes for layers without a window, "query" or "key", by its name."""
    made = {node["outputs"][0]: node for node in graph.nodes}
    of_all = [n for n in made.values() if n["op"] == "attention"]
    nodes = [n["inputs"] for n in of_all if n["attributes"]["window_left"] < 0]
    roles = {made[kv]["inputs"][0]: "key" for _, kv, *_ in nodes} | {q: "query" for q, *_ in nodes}
    if not all(name in made and made[name]["op"] == "rope" for name in roles):
        wrong = f"[Qwen1M] {graph.name}: expected rope to make attention's queries and keys"
        raise _core.UnsupportedError(wrong)
    return roles

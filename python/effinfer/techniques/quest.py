"""Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference (Tang et al.,
arXiv:2406.10774).

What a generated token attends to is next to nothing for most pages of keys. The least and the
greatest of a page's keys in each dimension bound how high a query's logits may be there (section
3.3), and a row visits the pages with the highest bounds. Nothing is dropped: the next token may
choose other pages.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from effinfer import _core
from effinfer.graph import GraphBuilder, Value
from effinfer.techniques.ranges import integer, number
from effinfer.techniques.rewrite import rewrite
from effinfer.techniques.technique import Meta, Technique

PAGE = 64
ALWAYS = 3  # pages that are not chosen: the first one, the token's own, and the one before it

# Attributes of an attention node that its index has too.
_SHARED = ("layer", "heads", "kv_heads", "head_dim", "sm_scale")


@dataclass(frozen=True)
class Quest(Technique):
    """
    Args:
        budget: keys that a generated token visits in a layer and KV head, in whole pages of 64.
        share: or this share of the pages that are chosen from, where it is more.
        min_tokens: tokens behind fewer keys visit all of them.
        skip_layers: so many first layers visit all keys.
    """

    META: ClassVar[Meta] = Meta(
        paper="Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference",
        arxiv="2406.10774",
        family="decode.sparse",
        primitives=("visits",),
        effect="approximate",
        needs=("attention",),
        exclusive=("decode.visits",),
        dense_limit={"budget": 1 << 30},
        probe="facts",
        differs="pages of 64 keys, not 16; the query heads of a KV head share a list; the first "
        "page and the two newest are visited in any case; bounds are bfloat16, rounded outwards",
    )

    budget: int = integer(1024, least=ALWAYS * PAGE)
    share: float = number(0.0, least=0.0, most=1.0)
    min_tokens: int = integer(2048)
    skip_layers: int = integer(2)

    def graph(self, graph: _core.Graph) -> _core.Graph:
        """With an index before every attention that has no window, behind that of prompts if there
        is one."""
        return rewrite(graph, self._visit)

    def facts(self) -> dict[str, str | int]:
        return {"chooses": "output", "min_tokens": self.min_tokens}

    def _visit(
        self, builder: GraphBuilder, node: dict[str, Any], inputs: list[Value]
    ) -> Value | None:
        facts = node["attributes"]
        if node["op"] != "attention" or facts["window_left"] >= 0:
            return None
        if facts["layer"] < self.skip_layers:
            return None
        shared = {key: facts[key] for key in _SHARED}
        visits = builder.page_index(
            *inputs,
            **shared,
            pages=self.budget // PAGE - ALWAYS,
            share=self.share,
            sink_tokens=PAGE,
            min_tokens=self.min_tokens,
        )
        return builder.node("attention", *inputs[:2], visits, **facts)

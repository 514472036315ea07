"""What sparse decodings have in common: a generated token visits only keys that a method chooses.

For each generated row and KV head an index node before attention writes a list of its own, from the
row's queries and what its sequence holds up to the row: the first page of 64 keys and the two
newest in any case, and of the others what the method scores highest. Nothing is dropped: the next
token may choose other keys. Prompts stay as they are, and so do layers whose sliding window has no
more than `min_tokens` keys. Where it has more, a token chooses of the pages that its window shows.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from effinfer import _core
from effinfer.graph import GraphBuilder, Value
from effinfer.techniques.ranges import integer, number
from effinfer.techniques.rewrite import Rule, rewrite
from effinfer.techniques.technique import Meta, Technique

# list_of(builder, node, inputs): the lists that an attention node visits, from nodes before it.
ListOf = Callable[[GraphBuilder, dict[str, Any], list[Value]], Value]
Chooses = Callable[[dict[str, Any]], bool]  # whether an attention node visits chosen keys

PAGE = 64
ALWAYS = 3 * PAGE  # keys that are not chosen: the first page, the token's own, the one before it

# Attributes of an attention node that its index has too.
_SHARED = ("layer", "heads", "kv_heads", "head_dim", "sm_scale")
_OF_WINDOWS = ("page_index", "key_index")  # what chooses of a window's keys


def sparse_decode(
    paper: str,
    arxiv: str,
    differs: str,
    effect: str = "approximate",
    name: str = "",
    in_prompts: bool = False,
) -> Meta:
    """The META of one, which may choose in prompts, too."""
    return Meta(
        paper=paper,
        arxiv=arxiv,
        family="attention.sparse" if in_prompts else "decode.sparse",
        primitives=("visits",),
        effect=effect,
        needs=("attention",),
        exclusive=("prefill.visits", "decode.visits") if in_prompts else ("decode.visits",),
        dense_limit={"budget": 1 << 30},
        probe="facts",
        differs=differs,
        name=name,
    )


def visits_all(node: dict[str, Any]) -> bool:
    """Whether a node is attention without a window."""
    return bool(node["op"] == "attention" and node["attributes"]["window_left"] < 0)


def shared_facts(node: dict[str, Any]) -> dict[str, Any]:
    """The attributes of an attention node that its index has too."""
    return {key: node["attributes"][key] for key in _SHARED}


def index_rule(chooses: Chooses, list_of: ListOf, reuse_layers: int = 1) -> Rule:
    """What becomes of a graph's nodes, in their order: every attention that `chooses` says visits
    the lists that `list_of` makes of it and its inputs, behind those of prompts if there are any.
    Of `reuse_layers` that follow each other one makes them."""
    lists: list[Value] = []  # of each layer that visits chosen keys

    def visit(builder: GraphBuilder, node: dict[str, Any], inputs: list[Value]) -> Value | None:
        if not chooses(node):
            return None
        facts = node["attributes"]
        if len(lists) % reuse_layers:
            shared = {key: facts[key] for key in ("layer", "heads", "kv_heads")}
            lists.append(builder.node("copy_index", lists[-1], *inputs[2:3], **shared))
        else:
            lists.append(list_of(builder, node, inputs))
        return builder.node("attention", *inputs[:2], lists[-1], **facts)

    return visit


@dataclass(frozen=True)
class SparseDecode(Technique, ABC):
    """
    Args:
        budget: keys that a generated token visits in a layer and KV head.
        share: or this share of those that are chosen from, where it is more.
        min_tokens: tokens behind fewer keys visit all of them.
        skip_layers: so many first layers visit all keys.
        reuse_layers: of so many layers that follow each other the first chooses, and the others
            visit what it has chosen.
    """

    META: ClassVar[Meta] = sparse_decode("a method of one's own", "", "")

    budget: int = integer(1024, least=ALWAYS)
    share: float = number(0.0, least=0.0, most=1.0)
    min_tokens: int = integer(2048)
    skip_layers: int = integer(2)
    reuse_layers: int = integer(1, least=1, keyword=True)

    @abstractmethod
    def index(self, layer: int, kv_heads: int) -> tuple[str, dict[str, Any]]:
        """The node that chooses a layer's keys, such as `page_index`, and its attributes
        (docs/graph_ops.md), where they are not those that all have."""

    def graph(self, graph: _core.Graph) -> _core.Graph:
        """With an index before every attention that chooses, behind that of prompts if there is
        one."""
        return rewrite(graph, self.rule())

    def rule(self) -> Rule:
        """What becomes of a graph's nodes, in their order."""
        return index_rule(self.chooses, self.list_of, self.reuse_layers)

    def chooses(self, node: dict[str, Any]) -> bool:
        """Whether a node is attention that visits chosen keys."""
        facts = node["attributes"]
        if node["op"] != "attention" or facts["layer"] < self.skip_layers:
            return False
        if visits_all(node):
            return True
        # Lists are copied to other windows, and kept in planes, of layers without one alone.
        op, chosen = self.index(facts["layer"], facts["kv_heads"])
        knows = op in _OF_WINDOWS and "plane" not in chosen and self.reuse_layers == 1
        return knows and facts["window_left"] >= self.min_tokens

    def facts(self) -> dict[str, str | int]:
        return {"chooses": "output", "min_tokens": self.min_tokens}

    def list_of(self, builder: GraphBuilder, node: dict[str, Any], inputs: list[Value]) -> Value:
        """Of an attention node and its inputs: the lists of its index."""
        op, chosen = self.choice(node)
        return builder.node(op, *inputs, **chosen)

    def choice(self, node: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Of an attention node: its index, with all attributes."""
        facts = node["attributes"]
        op, options = self.index(facts["layer"], facts["kv_heads"])
        window = {"window_left": facts["window_left"], "sink_tokens": facts["sink_tokens"]}
        return op, {
            **shared_facts(node),
            "keys": self.budget - ALWAYS,
            "share": self.share,
            "sink_tokens": PAGE,
            "min_tokens": self.min_tokens,
            **options,
            **({} if visits_all(node) else window),
        }

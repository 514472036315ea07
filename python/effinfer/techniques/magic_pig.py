"""MagicPIG: LSH Sampling for Efficient LLM Generation (Chen et al., arXiv:2410.16179).

The keys with the highest logits alone are not what attention sums up where it is spread over many:
their values are no mean of all values. So a generated token draws keys, the likelier the nearer
they lie to its query, by whether their hashes collide, and counts each the more often the less
likely it was (section 4). Sums over what is drawn then have the expectation of those over all keys.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from effinfer import _core
from effinfer.techniques.kv_rows import keys_and_values
from effinfer.techniques.ranges import choice, integer
from effinfer.techniques.rewrite import rewrite
from effinfer.techniques.sparse_decode import (
    PAGE,
    index_rule,
    shared_facts,
    sparse_decode,
    visits_all,
)
from effinfer.techniques.technique import Meta, Technique

if TYPE_CHECKING:
    from effinfer.graph import GraphBuilder, Value
    from effinfer.llm import LLM

_STEPS = 1024  # of the means of keys that a graph has, in 1


@dataclass(frozen=True)
class MagicPIG(Technique):
    """
    Args:
        bits: of a table, on which a key and a query agree or not.
        tables: of each query head. More of them, or fewer bits, draw more keys. A key takes bits x
            tables bits for each query head of its KV head beside the cache.
        seed: of the random hyperplanes that hash.
        means: of the keys of each dimension of each KV head, of layers without a window, in 1/1024:
            what calibrate() finds.
        min_tokens: tokens behind fewer keys visit all of them.
        skip_layers: so many first layers visit all keys.
    """

    META: ClassVar[Meta] = replace(
        sparse_decode(
            "MagicPIG: LSH Sampling for Efficient LLM Generation",
            "2410.16179",
            "keys lose a mean that is found once a model, not each prompt's; each query head has "
            "tables of its own, and those of a KV head share what any of them draws, which counts "
            "by the probability of that; hashes are looked at one by one, 64 keys at a time, in "
            "place of tables of buckets; the first page of 64 keys and the two newest are visited "
            "in any case",
            name="magic_pig",
        ),
        dense_limit={"min_tokens": 1 << 30},
    )

    bits: int = integer(8, least=1, most=8)
    tables: int = choice(40, tuple(range(8, 257, 8)))
    seed: int = integer(0)
    means: tuple[int, ...] = ()
    min_tokens: int = integer(2048)
    skip_layers: int = integer(2)

    def calibrate(self, llm: LLM, text: str) -> MagicPIG:
        """The same for a model, by a text of at least 256 tokens (else InvalidArgumentError)."""
        rows = list(keys_and_values(llm.files, llm.tokenize(text), rotated=True))
        means = [keys.mean(0, dtype=float) * _STEPS for keys in rows[::2]]
        return replace(self, means=tuple(int(mean) for each in means for mean in each.round()))

    def graph(self, graph: _core.Graph) -> _core.Graph:
        facts = [node["attributes"] for node in graph.nodes if visits_all(node)]
        sizes = {each["layer"]: each["kv_heads"] * each["head_dim"] for each in facts}
        if len(self.means) != sum(sizes.values()):
            raise _core.InvalidArgumentError(
                f"[MagicPIG] means: expected {sum(sizes.values())} (keys of {len(sizes)} layers), "
                f"as calibrate(llm, text) returns them, got {len(self.means)}"
            )
        left = iter(self.means)
        means = {layer: [next(left) for _ in range(size)] for layer, size in sizes.items()}

        def list_of(builder: GraphBuilder, node: dict[str, Any], inputs: list[Value]) -> Value:
            options = {"bits": self.bits, "tables": self.tables, "seed": self.seed}
            limits = {"sink_tokens": PAGE, "min_tokens": self.min_tokens}
            own = {**shared_facts(node), **options, **limits}
            return builder.node("hash_index", *inputs, **own, means=means[own["layer"]])

        def chooses(node: dict[str, Any]) -> bool:
            return visits_all(node) and node["attributes"]["layer"] >= self.skip_layers

        return rewrite(graph, index_rule(chooses, list_of))

    def facts(self) -> dict[str, str | int]:
        return {"chooses": "output", "min_tokens": self.min_tokens}

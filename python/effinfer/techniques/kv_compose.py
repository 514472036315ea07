"""KVCompose: Efficient Structured KV Cache Compression with Composite Tokens
(Akulov et al., arXiv:2509.05165).

Each KV head ranks the keys of a prompt for itself, by what its last rows attend to and by what the
layer's other heads think of them. The heads' r-th keys, which are keys of other tokens, then lie in
one slot: a composite token (section 3), so that heads differ and the cache stays a table. Composite
tokens of all layers may compete for one budget: layers then keep other numbers of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from effinfer import _core
from effinfer.techniques.layer_budgets import budgets_by_layer
from effinfer.techniques.ranges import choice, number
from effinfer.techniques.setup import Hook
from effinfer.techniques.snapkv import SnapKV
from effinfer.techniques.technique import Meta

if TYPE_CHECKING:
    from effinfer.techniques.setup import EngineSetup


@dataclass(frozen=True)
class KVCompose(SnapKV):
    """
    Args:
        budget, window, pool, pooling, chunk_tokens: as of `SnapKV`.
        shared: of the mean over the layer's KV heads, how much a head adds to its own scores.
        layer_budgets: whether the layers share `budget` times their number, in whole pages, by what
            their composite tokens have before they are pooled, in place of having one budget each.
            Layers then have page tables of their own, which GPUs refuse.
    """

    META: ClassVar[Meta] = Meta(
        paper="KVCompose: Efficient Structured KV Cache Compression with Composite Tokens",
        arxiv="2509.05165",
        family="kv.eviction",
        primitives=("scores", "residency", "hooks"),
        effect="approximate",
        needs=("attention",),
        exclusive=("kv.resident",),
        dense_limit={"budget": 1 << 30},
        differs="budgets by layer are of whole pages of composite tokens, and an option; the "
        "prompt's last rows ask, and their sum counts, where the paper's are those of a task, and "
        "the greatest counts",
        python_steps=True,
        name="kv_compose",
    )

    pool: int = choice(1, tuple(range(1, 64, 2)))
    shared: float = number(1.0, least=0.0)
    layer_budgets: bool = False

    def facts(self) -> dict[str, Any]:
        groups = {"layer_groups": 1} if self.layer_budgets else {}
        return {**super().facts(), **groups}

    def engine(self, setup: EngineSetup) -> None:
        keep = partial(self.keep, int(setup.graph.metadata["num_kv_heads"]))
        setup.hooks.append(Hook(self.name, {"prompt_end": 1}, keep))

    def keep(self, heads: int, _: _core.StepEvent, sequence: _core.SequenceState) -> None:
        scores = sequence.plane(self.name)
        layers = scores.reshape(-1, heads, sequence.length)
        layers += self.shared * layers.mean(axis=1, keepdims=True)
        sequence.set_plane(self.name, scores)
        counts = {-1: self.budget}  # of all layers
        if self.layer_budgets and sequence.length > self.budget:
            counts = dict(enumerate(budgets_by_layer(layers, self.budget, self.window)))
        for group, count in counts.items():
            sequence.keep_top(
                self.name,
                count,
                last=self.window,
                pool=self.pool,
                pooling=self.pooling,
                group=group,
            )

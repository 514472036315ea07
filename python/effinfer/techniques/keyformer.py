"""Keyformer: KV Cache Reduction through Key Tokens Selection for Efficient Generative Inference
(Adnan et al., arXiv:2403.09054).

Where keys are dropped, those that stay get what the others had of attention, which blurs who is
wanted: so keys are ranked by softmax((logit + Gumbel noise) / temperature), summed over rows, and
some that few rows wanted until now stay, too (section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from effinfer.techniques.attention_mass import with_attention_mass
from effinfer.techniques.h2o import H2O
from effinfer.techniques.ranges import number
from effinfer.techniques.technique import Meta

if TYPE_CHECKING:
    from effinfer import _core


@dataclass(frozen=True)
class Keyformer(H2O):
    """
    Args:
        budget, recent, stride, chunk_tokens, decay, reduce: as of `H2O`, which this is with
            temperature 1 and noise 0.
        temperature: of what keys are ranked by; above 1 it evens them out.
        noise: times the standard Gumbel noise. A key's is the same in all rows, and in all requests
            of its prompt.
    """

    META: ClassVar[Meta] = Meta(
        paper="Keyformer: KV Cache Reduction through Key Tokens Selection for Efficient Generative "
        "Inference",
        arxiv="2403.09054",
        family="kv.eviction",
        primitives=("scores", "residency", "hooks"),
        effect="approximate",
        needs=("attention",),
        exclusive=("kv.resident",),
        dense_limit={"budget": 1 << 30},
        differs="a key's noise is drawn once and not for each row; the temperature does not rise "
        "while tokens are generated; keys are dropped some at a time, within prompts too",
        name="keyformer",
    )

    temperature: float = number(1.0, above=0.0)
    noise: float = number(1.0, least=0.0)

    def facts(self) -> dict[str, str | int]:
        return {**super().facts(), "noise": f"{self.name}.noise"}

    def graph(self, graph: _core.Graph) -> _core.Graph:
        return with_attention_mass(graph, self.name, **self.ranking())

    def ranking(self) -> dict[str, Any]:
        return {**super().ranking(), "temperature": self.temperature, "noise": self.noise}

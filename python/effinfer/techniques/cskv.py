"""CSKV: Training-Efficient Channel Shrinking for KV Cache in Long-Context Scenarios
(Wang et al. 2024, arXiv:2409.10593).

What a layer's heads have of a token is kept as fewer numbers than they have channels, and these in
few bits (section 3.3); the newest tokens stay as they are, beside them (section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from effinfer.techniques.channel_basis import fit_bases
from effinfer.techniques.ranges import choice, integer
from effinfer.techniques.technique import Meta, Technique

if TYPE_CHECKING:
    from effinfer.llm import LLM


@dataclass(frozen=True)
class CSKV(Technique):
    """
    Args:
        features: that stand for a token's keys in all KV heads of a layer, and as many for its
            values: a multiple of 16, beyond 256 of 16 in each of equal parts of at most that.
        bits: of each, 4 or 2.
        residual: the newest tokens of a request whose pages stay as they are; up to 63 more do.
        basis: which features these are: what calibrate() finds.

    Throws InvalidArgumentError; models throw it for a basis that is not theirs, and
    UnsupportedError with a kv_dtype other than "bf16" and "f32".
    """

    META: ClassVar[Meta] = Meta(
        paper="CSKV: Training-Efficient Channel Shrinking for KV Cache in Long-Context Scenarios",
        arxiv="2409.10593",
        family="kv.formats",
        primitives=("encoded pages",),
        effect="approximate",
        needs=("attention",),
        # Slots of encoded pages are neither dropped nor looked at to choose some.
        exclusive=("kv.format", "kv.resident", "decode.visits"),
        dense_limit={"residual": 1 << 30},
        differs="channels are coordinates of keys and values that a model has computed, found in "
        "closed form on a text, in place of two factors of each projection that are trained layer "
        "by layer; keys are turned back by their positions for it; codes are KIVI's, of features",
        name="cskv",
    )

    features: int = integer(96, least=16)
    bits: int = choice(4, (4, 2))
    residual: int = integer(64)
    basis: tuple[int, ...] = field(default=(), repr=False)

    def calibrate(self, llm: LLM, text: str) -> CSKV:
        """The same with the basis of a model, by a text of at least 256 tokens, of which 2,048
        count. Throws InvalidArgumentError for a shorter one, or where the KV heads of a layer have
        fewer channels."""
        return replace(self, basis=fit_bases(llm.files, llm.tokenize(text), self.features))

    def facts(self) -> dict[str, Any]:
        return {
            "kv_bits": self.bits,
            "kv_residual": self.residual,
            "kv_features": self.features,
            "kv_basis": list(self.basis),
        }

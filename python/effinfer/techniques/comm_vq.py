"""CommVQ: Commutative Vector Quantization for KV Cache Compression
(Li et al. 2025, arXiv:2506.18879).

Keys and values are numbers of vectors in codebooks that are fitted to a model by expectation and
maximisation (section 3.2). Keys are turned back by their positions before, and a vector has both
dimensions of the pairs that a position rotates, so that it may be looked up first and turned then
(section 3.3).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from effinfer.techniques.codebooks import fit_codebooks
from effinfer.techniques.ranges import integer
from effinfer.techniques.technique import Meta, Technique

if TYPE_CHECKING:
    from effinfer.llm import LLM


@dataclass(frozen=True)
class CommVQ(Technique):
    """2 bits a number: a byte for 4 dimensions of a token.

    Args:
        residual: the newest tokens of a request whose pages stay as they are; up to 63 more do.
        codebooks: what calibrate() finds.

    Throws InvalidArgumentError; models throw it for codebooks that are not theirs, and
    UnsupportedError with a kv_dtype other than "bf16" and "f32".
    """

    META: ClassVar[Meta] = Meta(
        paper="CommVQ: Commutative Vector Quantization for KV Cache Compression",
        arxiv="2506.18879",
        family="kv.formats",
        primitives=("encoded pages",),
        effect="approximate",
        needs=("attention",),
        # Slots of encoded pages are neither dropped nor looked at to choose some.
        exclusive=("kv.format", "kv.resident", "decode.visits"),
        dense_limit={"residual": 1 << 30},
        differs="a vector has 4 dimensions and is one of 256, in place of sums of vectors of all "
        "of a head's dimensions; the nearest is searched, there is no encoder; pages are looked up "
        "whole before attention multiplies them",
        name="comm_vq",
    )

    residual: int = integer(64)
    codebooks: tuple[int, ...] = field(default=(), repr=False)

    def calibrate(self, llm: LLM, text: str) -> CommVQ:
        """The same with the codebooks of a model, by a text of at least 256 tokens, of which 2,048
        count: about a minute for a model of 135 million weights. Throws InvalidArgumentError for a
        shorter one."""
        return replace(self, codebooks=fit_codebooks(llm.files, llm.tokenize(text)))

    def facts(self) -> dict[str, Any]:
        return {
            "kv_bits": 2,
            "kv_residual": self.residual,
            "kv_codebooks": list(self.codebooks),
        }

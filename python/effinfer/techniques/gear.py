"""GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative Inference of LLM
(Kang et al. 2024, arXiv:2403.05527).

A page is what few bits say of it, a sparse matrix of outliers, which are taken out before ranges
are measured, and a matrix of low rank for what the codes of the others leave (algorithm 1).
"""

from dataclasses import dataclass
from typing import ClassVar

from effinfer.techniques.ranges import choice, integer
from effinfer.techniques.technique import Meta, Technique


@dataclass(frozen=True)
class GEAR(Technique):
    """
    Args:
        bits: of a number of keys and values, 4 or 2.
        rank, outliers: of what these lack, for each head and page of 64 keys, and of values: 2
            bytes for each of rank * (64 + head_dim) numbers, and 4 an outlier, up to a multiple
            of 64 bytes.
        residual: the newest tokens of a request whose pages stay as they are; up to 63 more do.

    Throws InvalidArgumentError; models throw UnsupportedError with a kv_dtype other than "bf16" and
    "f32".
    """

    META: ClassVar[Meta] = Meta(
        paper="GEAR: An Efficient KV Cache Compression Recipe for Near-Lossless Generative "
        "Inference of LLM",
        arxiv="2403.05527",
        family="kv.formats",
        primitives=("encoded pages",),
        effect="approximate",
        needs=("attention",),
        # Slots of encoded pages are neither dropped nor looked at to choose some.
        exclusive=("kv.format", "kv.resident", "decode.visits"),
        dense_limit={"residual": 1 << 30},
        differs="codes are KIVI's, of pages of 64 tokens; outliers are the numbers of a head and "
        "page farthest from the mean of their channel or token; factors are of a head and page",
        name="gear",
    )

    bits: int = choice(4, (4, 2))
    rank: int = integer(1, least=0, most=16)
    outliers: int = integer(64, least=0, most=256)
    residual: int = integer(64)

    def facts(self) -> dict[str, str | int]:
        return {
            "kv_bits": self.bits,
            "kv_residual": self.residual,
            "kv_rank": self.rank,
            "kv_outliers": self.outliers,
        }

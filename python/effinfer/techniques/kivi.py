"""KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache
(Liu et al. 2024, arXiv:2402.02750).

Keys have channels that stand out, values do not: keys share a range a channel, values a range a
token (section 3.2). The newest tokens stay as they are (section 3.3), and so does a prompt until it
is computed, which is why requests with and without the technique share cached prompts.
"""

from dataclasses import dataclass
from typing import ClassVar

from effinfer.techniques.ranges import choice, integer
from effinfer.techniques.technique import Meta, Technique


@dataclass(frozen=True)
class KIVI(Technique):
    """
    Args:
        bits: of a number of keys and values, 4 or 2. With their ranges they take 28 % or 17 % of
            the bytes of bfloat16.
        residual: the newest tokens of a request whose pages stay as they are; up to 63 more do.

    Throws InvalidArgumentError; models throw UnsupportedError with a kv_dtype other than "bf16" and
    "f32".
    """

    META: ClassVar[Meta] = Meta(
        paper="KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache",
        arxiv="2402.02750",
        family="kv.formats",
        primitives=("encoded pages",),
        effect="approximate",
        needs=("attention",),
        # Slots of encoded pages are neither dropped nor looked at to choose some.
        exclusive=("kv.format", "kv.resident", "decode.visits"),
        dense_limit={"residual": 1 << 30},
        differs="ranges of 64 keys, and of 64 (4 bits) or 32 dimensions of a value; layers with a "
        "window stay as they are",
        name="kivi",
    )

    bits: int = choice(4, (4, 2))
    residual: int = integer(64)

    def facts(self) -> dict[str, str | int]:
        return {"kv_bits": self.bits, "kv_residual": self.residual}

"""xKV: Cross-Layer SVD for KV-Cache Compression (Chang et al. 2025, arXiv:2503.18893).

What neighbouring layers have of a token lies in fewer directions than that of each of them does
(section 3.2), so they share their features: a page of these is kept once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from effinfer.techniques.channel_basis import fit_bases
from effinfer.techniques.cskv import CSKV
from effinfer.techniques.ranges import integer
from effinfer.techniques.technique import Meta

if TYPE_CHECKING:
    from effinfer.llm import LLM


@dataclass(frozen=True)
class XKV(CSKV):
    """
    Args:
        layers: that share features, so many neighbours; the last ones may be fewer.
        features: of all of them together, of keys and of values: a multiple of 16, beyond 256 of 16
            in each of equal parts of at most that.

    The others are CSKV's. Throws InvalidArgumentError; models throw it for a basis that is not
    theirs, and UnsupportedError with a kv_dtype other than "bf16" and "f32", or where layers that
    share features are on two devices.
    """

    META: ClassVar[Meta] = replace(
        CSKV.META,
        paper="xKV: Cross-Layer SVD for KV-Cache Compression",
        arxiv="2503.18893",
        differs="directions are found once a model on a text, not for each prompt; features are in "
        "KIVI's codes; the newest tokens stay as they are; tokens are not chosen before their keys "
        "are expanded",
        name="xkv",
    )

    layers: int = integer(3, least=1, keyword=True)
    features: int = integer(192, least=16)

    def calibrate(self, llm: LLM, text: str) -> XKV:
        """The same with the basis of a model, by a text of at least 256 tokens, of which 2,048
        count. Throws InvalidArgumentError for a shorter one, or where the KV heads of the layers
        have fewer channels."""
        ids = llm.tokenize(text)
        return replace(self, basis=fit_bases(llm.files, ids, self.features, self.layers))

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "kv_shared_layers": self.layers}

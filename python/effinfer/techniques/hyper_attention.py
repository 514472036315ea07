"""HyperAttention: Long-context Attention in Near-Linear Time (Han et al., arXiv:2310.05869).

Keys that a query gives much of its attention have hashes near its own. A block of rows visits the
keys whose hashes are nearest to those of its queries, and of all others a sample that is drawn
evenly and counts for them (section 2). Both are as many however long the text is.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from effinfer.techniques.prefill import SparsePrefill, sparse_prefill
from effinfer.techniques.ranges import integer
from effinfer.techniques.technique import Meta


@dataclass(frozen=True)
class HyperAttention(SparsePrefill):
    """
    Args:
        keys: that a block of rows visits by their hashes.
        samples: that it draws of the others. 0: others do not count.
        bits: of a hash.
        seed: of the random hyperplanes that hash, and of what is drawn.
        sink_tokens, local_tokens: keys that are visited in any case, of the first pages of 64 and
            of the nearest.
        min_tokens: blocks behind fewer keys visit all of them.

    Throws InvalidArgumentError.
    """

    META: ClassVar[Meta] = sparse_prefill(
        "HyperAttention: Long-context Attention in Near-Linear Time",
        "2310.05869",
        "rows stay in their order, in blocks of 64, and lists of keys before the block keep them "
        "causal, in place of halves of halves; the query heads of a KV head share a list; keys "
        "lose the mean of the first ones before they are hashed; buckets are ordered by how many "
        "of a block's queries lie near; one key is drawn from each of equal runs of the others",
        dense_limit={"min_tokens": 1 << 30},
        name="hyper_attention",
    )

    keys: int = integer(1024)
    samples: int = integer(1024)
    bits: int = integer(8, least=1, most=8)
    seed: int = integer(0)
    sink_tokens: int = integer(64)
    local_tokens: int = integer(256)
    min_tokens: int = integer(2048)

    def indices(self, layer: int, kv_heads: int) -> list[tuple[str, dict[str, Any]]]:
        options = {
            "bits": self.bits,
            "keys": self.keys,
            "samples": self.samples,
            "seed": self.seed,
            "sink_tokens": self.sink_tokens,
            "local_tokens": self.local_tokens,
            "min_tokens": self.min_tokens,
        }
        return [("bucket_index", options)]

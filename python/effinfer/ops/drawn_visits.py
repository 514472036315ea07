"""Lists of generated rows over `PagedKv` whose keys are drawn and say how often they count, for
`paged_attention(visits=...)`: `Visits(..., generated=True, weighted=True)`.

`log_weights` [B, num_kv_heads, 64 W] float32 is what attention adds to a visited token's logits,
the natural logarithm of how often it counts. It can be written, as `words`.
"""

from effinfer import _core
from effinfer._core import PagedKv, ThreadPool, Visits
from effinfer.ops.attention import rows_over
from effinfer.ops.shared.arrays import AnyArray, optional

__all__ = ["hash_visits"]


def hash_visits(
    visits: Visits,
    q: AnyArray,
    kv: PagedKv,
    qo_indptr: AnyArray,
    kv_indptr: AnyArray,
    kv_indices: AnyArray,
    kv_len: AnyArray,
    *,
    bits: int = 8,
    tables: int = 40,
    seed: int = 0,
    means: AnyArray | None = None,
    sink_tokens: int = 0,
    local_tokens: int = 0,
    min_tokens: int = 0,
    pool: ThreadPool | None = None,
) -> None:
    """Writes the lists of generated rows and how often their keys count: single keys that are drawn
    by whether their hashes collide with those of a query (MagicPIG, arXiv:2410.16179).

    A key is drawn when all `bits` agree in two of the `tables` of a query head of its KV head, or
    more; if that has the probability u, over random hyperplanes, it counts 1 / u times. What
    page_visits() has visited in any case counts once, and rows that visit all keys have no weights.

    Args:
        q: float32 [T, num_qo_heads, head_dim].
        bits: 1 to 8. tables: a multiple of 8 up to 256. seed: of the hyperplanes.
        means: float32 [num_kv_heads, head_dim], subtracted from keys; None: zeros.
        min_tokens: rows behind fewer keys visit all of them.
    """
    _core.hash_visits(
        visits,
        *rows_over("hash_visits", q, kv, qo_indptr, kv_indptr, kv_indices, kv_len),
        bits=bits,
        tables=tables,
        seed=seed,
        means=optional(means, "[hash_visits] means"),
        sink_tokens=sink_tokens,
        local_tokens=local_tokens,
        min_tokens=min_tokens,
        pool=pool,
    )

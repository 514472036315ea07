"""Attention over lists of keys."""

from typing import Any

from effinfer import _core
from effinfer._core import PagedKv, Queue, ThreadPool
from effinfer.ops.shared.places import place_of


class ListedAttention:
    """Attention over a `BlockIndex`, of arrays on the CPU or on a GPU."""

    def __init__(self, plan: _core.AttentionPlan) -> None:
        self._plan = plan

    @property
    def num_products(self) -> int:
        """Products of a query head's row with a key, masked ones included."""
        return self._plan.num_products

    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        lse: Any = None,
        *,
        pool: ThreadPool | Queue | None = None,
        **options: Any,
    ) -> None:
        """Writes `out`, of q's dtype, and `lse`, float32 [T, num_qo_heads].

        Args:
            k, v: as `KeyBatch` has keys; a `PagedKv` for both.
            options: `sm_scale`, `logits_soft_cap`, `lse_base`, `alibi_slopes`, `k_scale`,
                `v_scale`, `sink_logits`, and `layout` of paged keys.
        """
        op = "block index"
        at = place_of(q, pool, f"[{op}] q")
        keys, values = (
            x if isinstance(x, PagedKv) else at.view(x, f"[{op}] {name}")
            for x, name in ((k, "k"), (v, "v"))
        )
        self._plan.run(
            at.view(q, f"[{op}] q"),
            keys,
            values,
            at.writable(out, f"[{op}] out"),
            None if lse is None else at.writable(lse, f"[{op}] lse"),
            pool=at.executor,
            **options,
        )

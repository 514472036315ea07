"""Attention of a batch whose sequences share one prefix of contiguous keys, named as in FlashInfer:
the state of the prefix, computed once for all rows, merged with that of each sequence's own pages
(arXiv:2501.01005, section 3.1). `MultiLevelCascadeAttentionWrapper` takes any number of levels, in
pages."""

from typing import Any

from effinfer._core import ThreadPool
from effinfer.ops.cascade import merge_state_in_place
from effinfer.ops.decode import BatchDecodeWithPagedKVCacheWrapper
from effinfer.ops.prefill import BatchPrefillWithPagedKVCacheWrapper
from effinfer.ops.shared.options import errors_of
from effinfer.ops.shared.planned import require_plan
from effinfer.ops.single import single_prefill_with_kv_cache


class BatchDecodeWithSharedPrefixPagedKVCacheWrapper:
    """Decode attention: begin_forward() once a step, forward() once a layer."""

    _op = "batch_decode_with_shared_prefix"

    def __init__(self, float_workspace_buffer: Any = None, kv_layout: str = "NHD") -> None:
        with errors_of(self._op):
            self._own = BatchDecodeWithPagedKVCacheWrapper(None, kv_layout)
        self._layout = kv_layout

    def reset_workspace_buffer(
        self, float_workspace_buffer: Any, int_workspace_buffer: Any = None
    ) -> None:
        """Takes other workspaces, which have no effect."""

    def begin_forward(
        self,
        unique_kv_indptr: Any,
        unique_kv_indices: Any,
        unique_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        data_type: Any = None,
    ) -> None:
        """Fixes the lists of the sequences' own pages, as `BatchDecodeWithPagedKVCacheWrapper.plan`
        takes them. `data_type`: refuses other queries."""
        lists = (unique_kv_indptr, unique_kv_indices, unique_kv_last_page_len)
        with errors_of(self._op):
            self._own.plan(
                *lists, num_qo_heads, num_kv_heads, head_dim, page_size, data_type=data_type
            )

    def forward(
        self,
        q: Any,
        k_shared: Any,
        v_shared: Any,
        unique_kv_cache: Any,
        *,
        pool: ThreadPool | None = None,
    ) -> Any:
        """Attention of q [B, num_qo_heads, head_dim] over the keys of the prefix and then the
        sequences' own, of q's shape.

        Args:
            k_shared, v_shared: [prefix_len, num_kv_heads, head_dim] (NHD), or with the heads first
                (HND).
            unique_kv_cache: the pages, as of `BatchDecodeWithPagedKVCacheWrapper.run`.
        """
        with errors_of(self._op):
            own = self._own.run_return_lse(q, unique_kv_cache, pool=pool)
            return _with_prefix(own, q, k_shared, v_shared, self._layout, None, pool)


class BatchPrefillWithSharedPrefixPagedKVCacheWrapper:
    """Prefill attention: begin_forward() once a step, forward() once a layer."""

    _op = "batch_prefill_with_shared_prefix"

    def __init__(self, float_workspace_buffer: Any = None, kv_layout: str = "NHD") -> None:
        with errors_of(self._op):
            self._own = BatchPrefillWithPagedKVCacheWrapper(None, kv_layout)
        self._layout = kv_layout
        self._lists: dict[str, Any] | None = None
        self._causal = False

    def reset_workspace_buffer(
        self, float_workspace_buffer: Any, int_workspace_buffer: Any = None
    ) -> None:
        """Takes other workspaces, which have no effect."""

    def begin_forward(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
    ) -> None:
        """Fixes the lists of rows and own pages, as `BatchPrefillWithPagedKVCacheWrapper.plan`
        takes them; they must stay as they are until the last forward()."""
        self._lists = {
            "qo_indptr": qo_indptr,
            "paged_kv_indptr": paged_kv_indptr,
            "paged_kv_indices": paged_kv_indices,
            "paged_kv_last_page_len": paged_kv_last_page_len,
            "num_qo_heads": num_qo_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim_qk": head_dim,
            "page_size": page_size,
        }
        self._plan(False)

    def forward(
        self,
        q: Any,
        k_shared: Any,
        v_shared: Any,
        unique_kv_cache: Any,
        causal: bool = False,
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        pool: ThreadPool | None = None,
    ) -> Any:
        """Attention of q [qo_indptr[B], num_qo_heads, head_dim]; arrays are those of
        `BatchDecodeWithSharedPrefixPagedKVCacheWrapper.forward`. `causal` is of the own pages; all
        rows see the prefix. rope_scale and rope_theta have no effect: nothing is rotated."""
        require_plan(self._lists, self._op)
        if causal != self._causal:
            self._plan(causal)
        with errors_of(self._op):
            own = self._own.run_return_lse(q, unique_kv_cache, sm_scale=sm_scale, pool=pool)
            return _with_prefix(own, q, k_shared, v_shared, self._layout, sm_scale, pool)

    def _plan(self, causal: bool) -> None:
        with errors_of(self._op):
            self._own.plan(**require_plan(self._lists, self._op), causal=causal)
        self._causal = causal


def _with_prefix(
    own: tuple[Any, Any],
    q: Any,
    k: Any,
    v: Any,
    kv_layout: str,
    sm_scale: float | None,
    pool: ThreadPool | None,
) -> Any:
    """The output of the state `own`, merged in place with that of keys which all rows see."""
    prefix = single_prefill_with_kv_cache(
        q, k, v, kv_layout=kv_layout, sm_scale=sm_scale, return_lse=True, pool=pool
    )
    merge_state_in_place(*own, *prefix, pool=pool)
    return own[0]

"""Attention with a sink in every softmax (gpt-oss), named as in FlashInfer."""

from typing import Any

from effinfer.ops.prefill import BatchPrefillWithPagedKVCacheWrapper
from effinfer.ops.shared.options import data_type_name, expect


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """`BatchPrefillWithPagedKVCacheWrapper` whose run() takes the sinks and the scale by position.

    What FlashInfer compiles a kernel for is asked of plan(): where the constructor is given
    dimensions, types or a window, plan() must be given the same.
    """

    _op = "batch_attention_with_attention_sink"

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        paged_kv_indptr_buf: Any = None,
        paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        pos_encoding_mode: str | None = None,
        use_fp16_qk_reduction: bool = False,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        head_dim_qk: int | None = None,
        head_dim_vo: int | None = None,
        window_left: int = -1,
    ) -> None:
        super().__init__(
            float_workspace_buffer,
            kv_layout,
            use_cuda_graph,
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
            custom_mask_buf,
            mask_indptr_buf,
        )
        self._fixed: dict[str, Any] = {
            "pos_encoding_mode": pos_encoding_mode,
            "head_dim_qk": head_dim_qk,
            "head_dim_vo": head_dim_vo,
            "window_left": None if window_left < 0 else window_left,
        }
        self._q_data_type = q_data_type

    def plan(self, *lists: Any, **options: Any) -> None:
        """`BatchPrefillWithPagedKVCacheWrapper.plan`, held to what the constructor was given."""
        if self._q_data_type is not None and len(lists) < 20:
            given = data_type_name(options.setdefault("q_data_type", self._q_data_type))
            fixed = data_type_name(self._q_data_type)
            expect(
                given == fixed, f"[{self._op}] q_data_type", f"{fixed}, of the constructor", given
            )
        super().plan(*lists, **options)
        planned = self._planned
        assert planned is not None
        plan: dict[str, Any] = {
            "pos_encoding_mode": planned.scores.pos_encoding_mode,
            "head_dim_qk": planned.heads.head_dim_qk,
            "head_dim_vo": planned.heads.head_dim_vo,
            "window_left": planned.window_left,
        }
        for name, fixed in self._fixed.items():
            ok = fixed in (None, plan[name])
            if not ok:
                self._planned = None
            expect(ok, f"[{self._op}] {name}", f"{fixed}, of the constructor", plan[name])

    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        sinks: Any = None,
        sm_scale: float | None = None,
        **options: Any,
    ) -> Any:
        """Attention of q [qo_indptr[B], num_qo_heads, head_dim_qk].

        Args:
            sinks: float32 [num_qo_heads]: the logit, neither scaled nor capped, of one more key
                whose value is zero.
            sm_scale: takes the place of the plan's.
            options: of `BatchDecodeWithPagedKVCacheWrapper.run`.
        """
        return super().run(q, paged_kv_cache, sinks=sinks, sm_scale=sm_scale, **options)

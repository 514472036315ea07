"""Attention of many query rows a sequence, named as in FlashInfer; `decode` describes caches,
scores, `lse` and the arguments that have no effect.

A sequence's query rows are its last tokens: with `causal`, row i of n sees the keys up to
kv_len - n + i. A mask takes the place of `causal`; windows apply to both. Masks are booleans,
[n, kv_len] of one sequence after the other; packed ones have bit i * kv_len + j in the lowest free
bit of a byte, each sequence from a new byte (`segment_packbits(..., bitorder="little")`).
"""

from typing import Any

from effinfer.ops.ragged import BatchPrefillWithRaggedKVCacheWrapper
from effinfer.ops.shared.batch_prefill import BatchPrefill
from effinfer.ops.shared.flashinfer import check_agreement, check_splits, query_type, run_planned
from effinfer.ops.shared.masks import Items, plan_masks
from effinfer.ops.shared.options import Scores, kv_views
from effinfer.ops.shared.places import place_of
from effinfer.ops.shared.planned import require_plan
from effinfer.ops.shared.sequences import Heads, Sequences
from effinfer.ops.single import single_prefill_with_kv_cache

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
]


class BatchPrefillWithPagedKVCacheWrapper(BatchPrefill):
    """Prefill or append attention of a batch over a paged cache: plan() once a step, run() once a
    layer."""

    _op = "batch_prefill_with_paged_kv_cache"

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
        jit_args: Any = None,
        jit_kwargs: Any = None,
        variant_owns_mask: bool = False,
    ) -> None:
        """Args:
        qo_indptr_buf, paged_kv_indptr_buf: int32 [B + 1], paged_kv_indices_buf: int32 [pages at
            most], paged_kv_last_page_len_buf: int32 [B], custom_mask_buf: uint8 [bytes at most],
            mask_indptr_buf: int32 [B + 1]; with use_cuda_graph every batch has B sequences, and
            plan() copies its lists, and its packed mask, to these.
        """
        refused = {"jit_args": jit_args, "jit_kwargs": jit_kwargs}
        self._start(kv_layout, **refused, variant_owns_mask=variant_owns_mask)
        if use_cuda_graph:
            self._fix(
                {"custom_mask_buf": custom_mask_buf, "mask_indptr_buf": mask_indptr_buf},
                qo_indptr_buf=qo_indptr_buf,
                paged_kv_indptr_buf=paged_kv_indptr_buf,
                paged_kv_indices_buf=paged_kv_indices_buf,
                paged_kv_last_page_len_buf=paged_kv_last_page_len_buf,
            )

    def plan(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Any = None,
        token_pos_in_items_ptr: Any = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Any = None,
        seq_lens: Any = None,
        seq_lens_q: Any = None,
        block_tables: Any = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        """Fixes the lists of the next runs: sequence b owns the rows qo_indptr[b]:qo_indptr[b + 1]
        and the pages paged_kv_indices[paged_kv_indptr[b]:paged_kv_indptr[b + 1]], all int32, with
        paged_kv_last_page_len[b] tokens, 1 to page_size, in the last one.

        `prefix_len_ptr` and what follows it: multi-item scoring, `effinfer.ops.shared.masks.Items`,
        in the place of causal. `seq_lens` and what follows: `effinfer.ops.shared.flashinfer`.
        """
        names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        sequences = Sequences.paged(self._op, qo_indptr, *pages, page_size, names)
        check_splits(self._op, fixed_split_size, disable_split_kv)
        check_agreement(
            self._op,
            sequences,
            seq_lens=seq_lens,
            seq_lens_q=seq_lens_q,
            block_tables=block_tables,
            max_token_per_sequence=max_token_per_sequence,
            max_sequence_kv=max_sequence_kv,
            uniform_q_len=uniform_q_len,
        )
        items = Items(
            prefix_len_ptr, token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr
        )
        given = (custom_mask, packed_custom_mask, causal)
        dim_vo = head_dim_qk if head_dim_vo is None else head_dim_vo
        heads = Heads(num_qo_heads, num_kv_heads, head_dim_qk, dim_vo)
        masks = plan_masks(self._op, sequences, heads.check(self._op).num_kv_heads, *given, items)
        self._plan(
            sequences,
            heads,
            Scores(sm_scale, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta),
            masks,
            query_type(self._op, q_data_type, o_data_type),
            window_left,
            paged_kv_indptr_buf=sequences.kv_indptr,
            paged_kv_indices_buf=sequences.listed_pages,
            paged_kv_last_page_len_buf=paged_kv_last_page_len,
        )

    def run(self, q: Any, paged_kv_cache: Any, **options: Any) -> Any:
        """Attention of q [qo_indptr[B], num_qo_heads, head_dim_qk]; the options and results of
        `BatchDecodeWithPagedKVCacheWrapper.run`."""
        planned = require_plan(self._planned, self._op)
        at = place_of(q, options.get("pool"), f"[{self._op}] q")
        k, v = kv_views(self._op, paged_kv_cache, self._layout, at=at)
        return run_planned(planned, q, k, v, **options)

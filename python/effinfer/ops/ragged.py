"""Attention of many query rows a sequence over keys that lie one sequence after the other, named as
in FlashInfer; `prefill` describes rows and masks."""

from typing import Any

import numpy as np

from effinfer.ops.shared.batch_prefill import BatchPrefill
from effinfer.ops.shared.flashinfer import check_agreement, check_splits, query_type, run_planned
from effinfer.ops.shared.masks import Items, plan_masks
from effinfer.ops.shared.options import Scores, expect, indptr, view_3d
from effinfer.ops.shared.places import place_of
from effinfer.ops.shared.planned import require_plan
from effinfer.ops.shared.sequences import Heads, Sequences


class BatchPrefillWithRaggedKVCacheWrapper(BatchPrefill):
    """Prefill attention of a batch whose keys lie one sequence after the other."""

    _op = "batch_prefill_with_ragged_kv_cache"

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        kv_indptr_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        variant_owns_mask: bool = False,
    ) -> None:
        """Buffers are those of `BatchPrefillWithPagedKVCacheWrapper`, kv_indptr_buf int32
        [B + 1]."""
        refused = {"jit_args": jit_args, "jit_kwargs": jit_kwargs}
        self._start(kv_layout, **refused, variant_owns_mask=variant_owns_mask)
        if use_cuda_graph:
            self._fix(
                {"custom_mask_buf": custom_mask_buf, "mask_indptr_buf": mask_indptr_buf},
                qo_indptr_buf=qo_indptr_buf,
                kv_indptr_buf=kv_indptr_buf,
            )

    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Any = None,
        seq_lens_q: Any = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: Any = None,
        o_indptr: Any = None,
        uniform_q_len: int | None = None,
    ) -> None:
        """Fixes the lists of the next runs: sequence b owns the rows qo_indptr[b]:qo_indptr[b + 1]
        of q and kv_indptr[b]:kv_indptr[b + 1] of k and v; int32 [B + 1]. v_indptr and o_indptr are
        kv_indptr and qo_indptr; the others are those of
        `BatchPrefillWithPagedKVCacheWrapper.plan`."""
        keys = indptr(kv_indptr, f"[{self._op}] kv_indptr")
        rows = indptr(qo_indptr, f"[{self._op}] qo_indptr", keys.size)
        for name, given, meant in (("v_indptr", v_indptr, keys), ("o_indptr", o_indptr, rows)):
            ok = given is None or np.array_equal(indptr(given, f"[{self._op}] {name}"), meant)
            expect(ok, f"[{self._op}] {name}", "the rows of k, or of q", "others")
        sequences = Sequences(rows, keys, None, np.diff(keys))
        check_splits(self._op, fixed_split_size, disable_split_kv)
        check_agreement(
            self._op,
            sequences,
            seq_lens=seq_lens,
            seq_lens_q=seq_lens_q,
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
            kv_indptr_buf=keys,
        )

    def run(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        """Attention of q [qo_indptr[B], num_qo_heads, head_dim_qk] over k and v [kv_indptr[B],
        num_kv_heads, head_dim] (NHD), or with the heads first (HND); the options and results of
        `BatchDecodeWithPagedKVCacheWrapper.run`."""
        planned = require_plan(self._planned, self._op)
        at = place_of(q, options.get("pool"), f"[{self._op}] q")
        keys, values = view_3d(k, f"[{self._op}] k", at), view_3d(v, f"[{self._op}] v", at)
        return run_planned(planned, q, keys, values, **options)

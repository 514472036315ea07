"""Attention of many query rows a sequence, named as in FlashInfer; `decode` describes caches,
scores, `lse` and the arguments that have no effect.

A sequence's query rows are its last tokens: with `causal`, row i of n sees the keys up to
kv_len - n + i. A mask takes the place of `causal`; windows apply to both. Masks are booleans,
[n, kv_len] of one sequence after the other; packed ones have bit i * kv_len + j in the lowest free
bit of a byte, each sequence from a new byte (`segment_packbits(..., bitorder="little")`).
"""

from typing import Any

import numpy as np

from effinfer._core import ThreadPool
from effinfer.ops.shared.options import (
    LAYOUTS,
    Scores,
    indptr,
    kv_views,
    one_of,
    pack_mask,
    view_3d,
)
from effinfer.ops.shared.planned import PlannedAttention, plan_single, require_plan
from effinfer.ops.shared.sequences import Heads, Sequences


def single_prefill_with_kv_cache(
    q: Any,
    k: Any,
    v: Any,
    *,
    custom_mask: Any = None,
    packed_custom_mask: Any = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    lse_base: str = "log2",
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    pool: ThreadPool | None = None,
) -> Any:
    """Attention of the rows of one sequence over its contiguous keys.

    Args:
        q: [qo_len, num_qo_heads, head_dim_qk].
        k, v: [kv_len, num_kv_heads, head_dim_qk or head_dim_vo] (NHD), or with the heads first
            (HND).
        custom_mask: bool [qo_len, kv_len]; packed_custom_mask: uint8 [ceil(qo_len * kv_len / 8)].

    Returns:
        [qo_len, num_qo_heads, head_dim_vo]; with return_lse a pair with float32 [qo_len,
        num_qo_heads].
    """
    op = "single_prefill_with_kv_cache"
    shape = view_3d(q, f"[{op}] q").shape
    tokens = view_3d(k, f"[{op}] k").shape[0 if kv_layout == "NHD" else 1]
    rows, lengths = np.array([0, shape[0]], np.int32), np.array([tokens], np.int32)
    planned, keys, values = plan_single(
        op,
        shape,
        k,
        v,
        kv_layout,
        Scores(sm_scale, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta),
        window_left=window_left,
        **mask_options(op, custom_mask, packed_custom_mask, causal, rows, lengths),
    )
    return planned.run(
        q,
        keys,
        values,
        return_lse=return_lse,
        lse_base=lse_base,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        pool=pool,
    )


def mask_options(
    op: str, custom_mask: Any, packed: Any, causal: bool, qo_indptr: Any, kv_len: Any
) -> dict[str, Any]:
    """The plan's options for a mask, which replaces `causal`, or for none."""
    mask = pack_mask(op, custom_mask, packed, qo_indptr, kv_len)
    if mask is None:
        return {"causal": causal}
    return {"mask": mask[0], "mask_indptr": mask[1]}


class _BatchPrefill:
    _op: str

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        *,
        backend: str = "auto",
    ) -> None:
        self._layout = one_of(kv_layout, LAYOUTS, f"[{self._op}] kv_layout")
        self._planned: PlannedAttention | None = None

    def _plan(
        self,
        sequences: Sequences,
        heads: Heads,
        scores: Scores,
        masks: tuple[Any, Any, bool],
        q_data_type: Any,
        window_left: int,
    ) -> None:
        self._planned = PlannedAttention(
            self._op,
            sequences,
            heads,
            scores,
            layout=self._layout,
            q_data_type=q_data_type,
            window_left=window_left,
            **mask_options(self._op, *masks, sequences.qo_indptr, sequences.kv_len),
        )


class BatchPrefillWithPagedKVCacheWrapper(_BatchPrefill):
    """Prefill or append attention of a batch over a paged cache: plan() once a step, run() once a
    layer."""

    _op = "batch_prefill_with_paged_kv_cache"

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
        *,
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
        non_blocking: bool = True,
    ) -> None:
        """Fixes the lists of the next runs: sequence b owns the rows qo_indptr[b]:qo_indptr[b + 1]
        and the pages paged_kv_indices[paged_kv_indptr[b]:paged_kv_indptr[b + 1]], all int32, with
        paged_kv_last_page_len[b] tokens, 1 to page_size, in the last one."""
        names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        sequences = Sequences.paged(self._op, qo_indptr, *pages, page_size, names)
        dim_vo = head_dim_qk if head_dim_vo is None else head_dim_vo
        self._plan(
            sequences,
            Heads(num_qo_heads, num_kv_heads, head_dim_qk, dim_vo),
            Scores(sm_scale, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta),
            (custom_mask, packed_custom_mask, causal),
            q_data_type,
            window_left,
        )

    def run(self, q: Any, paged_kv_cache: Any, **options: Any) -> Any:
        """Attention of q [qo_indptr[B], num_qo_heads, head_dim_qk]; the options and results of
        `BatchDecodeWithPagedKVCacheWrapper.run`."""
        planned = require_plan(self._planned, self._op)
        return planned.run(q, *kv_views(self._op, paged_kv_cache, self._layout), **options)


class BatchPrefillWithRaggedKVCacheWrapper(_BatchPrefill):
    """Prefill attention of a batch whose keys lie one sequence after the other."""

    _op = "batch_prefill_with_ragged_kv_cache"

    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        *,
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
        non_blocking: bool = True,
    ) -> None:
        """Fixes the lists of the next runs: sequence b owns the rows qo_indptr[b]:qo_indptr[b + 1]
        of q and kv_indptr[b]:kv_indptr[b + 1] of k and v; int32 [B + 1]."""
        keys = indptr(kv_indptr, f"[{self._op}] kv_indptr")
        rows = indptr(qo_indptr, f"[{self._op}] qo_indptr", keys.size)
        dim_vo = head_dim_qk if head_dim_vo is None else head_dim_vo
        self._plan(
            Sequences(rows, keys, None, np.diff(keys)),
            Heads(num_qo_heads, num_kv_heads, head_dim_qk, dim_vo),
            Scores(sm_scale, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta),
            (custom_mask, packed_custom_mask, causal),
            q_data_type,
            window_left,
        )

    def run(self, q: Any, k: Any, v: Any, **options: Any) -> Any:
        """Attention of q [qo_indptr[B], num_qo_heads, head_dim_qk] over k and v [kv_indptr[B],
        num_kv_heads, head_dim] (NHD), or with the heads first (HND); the options and results of
        `BatchDecodeWithPagedKVCacheWrapper.run`."""
        planned = require_plan(self._planned, self._op)
        keys, values = view_3d(k, f"[{self._op}] k"), view_3d(v, f"[{self._op}] v")
        return planned.run(q, keys, values, **options)

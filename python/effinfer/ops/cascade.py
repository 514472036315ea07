"""Attention over parts of the keys, and its merging, named as in FlashInfer.

A state is what attention over some keys gives: its output v and s, the log-sum-exp of its scores
(`return_lse=True`), in base 2 or, with `lse_base="ln"`, e. States of disjoint sets of keys merge to
the state of their union (arXiv:2501.01005, section 3.1). A state with s = -infinity saw no key and
counts for nothing, whatever its v holds.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from effinfer import _core
from effinfer._core import Queue, ThreadPool
from effinfer.ops.prefill import BatchPrefillWithPagedKVCacheWrapper
from effinfer.ops.shared.options import expect, kv_views
from effinfer.ops.shared.places import place_of, to_host
from effinfer.ops.shared.planned import require_plan


def merge_state(
    v_a: Any,
    s_a: Any,
    v_b: Any,
    s_b: Any,
    *,
    lse_base: str = "log2",
    pool: ThreadPool | Queue | None = None,
) -> tuple[Any, Any]:
    """The merged state (v [T, H, D] of v_a's dtype, s float32 [T, H]) of two.

    Args:
        v_a, v_b: [T, H, D], float32, float16 or bfloat16.
        s_a, s_b: float32 [T, H].
    """
    op = "[merge_state]"
    at = place_of(v_a, pool, f"{op} v_a")
    first = at.dense(v_a, f"{op} v_a")
    expect(first.ndim == 3, f"{op} v_a", "3 dimensions", f"shape {first.shape}")
    v, v_view = at.empty(v_a, first.shape)
    s, s_view = at.empty(v_a, first.shape[:2], np.float32)
    sums = at.dense(s_a, f"{op} s_a")
    other, other_sums = at.dense(v_b, f"{op} v_b"), at.dense(s_b, f"{op} s_b")
    _core.merge_state(
        first, sums, other, other_sums, v_view, s_view, lse_base=lse_base, pool=at.executor
    )
    return v, s


def merge_state_in_place(
    v: Any,
    s: Any,
    v_other: Any,
    s_other: Any,
    mask: Any = None,
    *,
    lse_base: str = "log2",
    pool: ThreadPool | Queue | None = None,
) -> None:
    """`merge_state` of (v, s) and the other state, written to v and s.

    Args:
        mask: bool [T]; tokens where it is False keep their state.
    """
    op = "[merge_state_in_place]"
    at = place_of(v, pool, f"{op} v")
    target, sums = at.writable(v, f"{op} v"), at.writable(s, f"{op} s")
    other, other_sums = at.dense(v_other, f"{op} v_other"), at.dense(s_other, f"{op} s_other")
    rows = None if mask is None else at.dense(mask, f"{op} mask")
    _core.merge_state(
        target,
        sums,
        other,
        other_sums,
        target,
        sums,
        mask=rows,
        lse_base=lse_base,
        pool=at.executor,
    )


def merge_states(
    v: Any, s: Any, *, lse_base: str = "log2", pool: ThreadPool | Queue | None = None
) -> tuple[Any, Any]:
    """The merged state (v [T, H, D], s float32 [T, H]) of v [T, S, H, D] and s [T, S, H]."""
    at = place_of(v, pool, "[merge_states] v")
    vectors = at.dense(v, "[merge_states] v")
    expect(vectors.ndim == 4, "[merge_states] v", "4 dimensions", f"shape {vectors.shape}")
    tokens, _, heads, head_dim = vectors.shape
    merged, merged_view = at.empty(v, (tokens, heads, head_dim))
    sums, sums_view = at.empty(v, (tokens, heads), np.float32)
    given = at.dense(s, "[merge_states] s")
    _core.merge_states(vectors, given, merged_view, sums_view, lse_base=lse_base, pool=at.executor)
    return merged, sums


class MultiLevelCascadeAttentionWrapper:
    """Attention of a batch whose sequences share prefixes: a level holds what groups of the level
    below have in common, and its keys are read once for the whole group.

    All levels' pages lie in one cache. The result is that of the concatenated keys of all levels.
    """

    _op = "multi_level_cascade_attention"

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: Sequence[Any] | None = None,
        paged_kv_indptr_buf_arr: Sequence[Any] | None = None,
        paged_kv_indices_buf_arr: Sequence[Any] | None = None,
        paged_kv_last_page_len_buf_arr: Sequence[Any] | None = None,
    ) -> None:
        """The buffers of `BatchPrefillWithPagedKVCacheWrapper`, one of each for a level."""
        op = f"[{self._op}]"
        expect(num_levels > 0, f"{op} num_levels", "a positive number", num_levels)
        buffers = {
            "qo_indptr_buf_arr": qo_indptr_buf_arr,
            "paged_kv_indptr_buf_arr": paged_kv_indptr_buf_arr,
            "paged_kv_indices_buf_arr": paged_kv_indices_buf_arr,
            "paged_kv_last_page_len_buf_arr": paged_kv_last_page_len_buf_arr,
        }
        for name, given in buffers.items():
            count = None if given is None else len(given)
            ok = count == num_levels or not use_cuda_graph
            expect(ok, f"{op} {name}", f"{num_levels} buffers with use_cuda_graph", count)
        self._layout, self._fixed = kv_layout, use_cuda_graph
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(
                None,
                kv_layout,
                use_cuda_graph,
                **{name[: -len("_arr")]: x[level] for name, x in buffers.items() if x},
            )
            for level in range(num_levels)
        ]
        self._rows: int | None = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the levels have buffers of fixed sizes."""
        return self._fixed

    def reset_workspace_buffer(
        self, float_workspace_buffer: Any, int_workspace_buffers: Any = None
    ) -> None:
        """Takes other workspaces, which have no effect."""

    def plan(
        self,
        qo_indptr_arr: Sequence[Any],
        paged_kv_indptr_arr: Sequence[Any],
        paged_kv_indices_arr: Sequence[Any],
        paged_kv_last_page_len: Sequence[Any],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
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
    ) -> None:
        """Fixes the lists of the next runs, one of each for a level, from the shared one down, as
        `BatchPrefillWithPagedKVCacheWrapper.plan` takes them; all levels have the same rows.

        `causal` holds in the last level, whose keys are the sequences' own. Positions within a
        level are not those of the sequence: windows, ROPE_LLAMA and ALIBI are refused.
        """
        op = f"[{self._op}]"
        lists = {
            "qo_indptr_arr": qo_indptr_arr,
            "paged_kv_indptr_arr": paged_kv_indptr_arr,
            "paged_kv_indices_arr": paged_kv_indices_arr,
            "paged_kv_last_page_len": paged_kv_last_page_len,
        }
        levels = len(self._levels)
        for name, given in lists.items():
            expect(len(given) == levels, f"{op} {name}", f"{levels} levels", len(given))
        expect(pos_encoding_mode == "NONE", f"{op} pos_encoding_mode", "NONE", pos_encoding_mode)
        expect(window_left == -1, f"{op} window_left", "-1", window_left)
        self._rows = None
        for level, wrapper in enumerate(self._levels):
            wrapper.plan(
                qo_indptr_arr[level],
                paged_kv_indptr_arr[level],
                paged_kv_indices_arr[level],
                paged_kv_last_page_len[level],
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                causal=causal and level == levels - 1,
                sm_scale=sm_scale,
                logits_soft_cap=logits_soft_cap,
                q_data_type=q_data_type,
            )
        rows = [int(to_host(each, f"{op} qo_indptr_arr")[-1]) for each in qo_indptr_arr]
        expect(len(set(rows)) == 1, f"{op} qo_indptr_arr", "as many rows in all levels", rows)
        self._rows = rows[0]

    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        k_scale: Any = None,
        v_scale: Any = None,
        pool: ThreadPool | Queue | None = None,
    ) -> Any:
        """Attention of q [T, num_qo_heads, head_dim] over all levels; with return_lse a pair with
        float32 [T, num_qo_heads]."""
        require_plan(self._rows, self._op)
        at = place_of(q, pool, f"[{self._op}] q")
        cache = kv_views(self._op, paged_kv_cache, self._layout, at=at)
        options = {
            "return_lse": True,
            "lse_base": lse_base,
            "k_scale": k_scale,
            "v_scale": v_scale,
            "pool": pool,
        }
        # The last level first, as it is the one whose rows all see keys.
        v, s = self._levels[-1].run(q, cache, out=out, lse=lse, **options)
        for wrapper in self._levels[:-1]:
            merge_state_in_place(v, s, *wrapper.run(q, cache, **options), lse_base=lse_base)
        return (v, s) if return_lse else v

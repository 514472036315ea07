"""Attention of one new token for each sequence, named as in FlashInfer.

Caches are NHD [num_pages, page_size, num_kv_heads, head_dim] or HND [num_pages, num_kv_heads,
page_size, head_dim]: a tuple (k, v) of them, or one array [num_pages, 2, ...]. q is float32,
float16 or bfloat16; caches are those, an 8-bit float or int8. num_qo_heads is a multiple of
num_kv_heads.

Scores are q k^T * sm_scale (default 1 / sqrt(head_dim)), then, where asked for, ALiBi's bias and
cap * tanh(score / cap). A query sees keys at most `window_left` tokens before it; -1: all. `lse` is
the log-sum-exp of its scores, in base 2 unless `lse_base="ln"`. A query without keys gives zeros
and -infinity.

Workspace buffers and the options of CUDA kernels (use_tensor_cores, use_cuda_graph,
use_fp16_qk_reduction, backend, non_blocking) are accepted and have no effect.
"""

from typing import Any

from effinfer._core import ThreadPool
from effinfer.ops.shared.arrays import view
from effinfer.ops.shared.options import LAYOUTS, Scores, expect, kv_views, one_of
from effinfer.ops.shared.planned import PlannedAttention, plan_single, require_plan
from effinfer.ops.shared.sequences import Heads, Sequences


def single_decode_with_kv_cache(
    q: Any,
    k: Any,
    v: Any,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    *,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
    lse_base: str = "log2",
    pool: ThreadPool | None = None,
) -> Any:
    """Attention of one token over the contiguous keys of its sequence.

    Args:
        q: [num_qo_heads, head_dim].
        k, v: [kv_len, num_kv_heads, head_dim] (NHD) or [num_kv_heads, kv_len, head_dim] (HND).
        q_scale, k_scale: factors on the scores; v_scale: on the result.

    Returns:
        [num_qo_heads, head_dim]; with return_lse a pair with float32 [num_qo_heads].
    """
    op = "single_decode_with_kv_cache"
    shape = view(q, f"[{op}] q").shape
    expect(len(shape) == 2, f"[{op}] q", "2 dimensions", f"shape {shape}")
    planned, keys, values = plan_single(
        op,
        (1, *shape),
        k,
        v,
        kv_layout,
        Scores(sm_scale, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta),
        window_left=window_left,
        decode=True,
    )
    result = planned.run(
        q[None],
        keys,
        values,
        return_lse=return_lse,
        lse_base=lse_base,
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        pool=pool,
    )
    return (result[0][0], result[1][0]) if return_lse else result[0]


class BatchDecodeWithPagedKVCacheWrapper:
    """Decode attention of a batch over a paged cache: plan() once a step, run() once a layer."""

    _op = "batch_decode_with_paged_kv_cache"

    def __init__(
        self,
        float_workspace_buffer: Any = None,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        *,
        backend: str = "auto",
    ) -> None:
        self._layout = one_of(kv_layout, LAYOUTS, f"[{self._op}] kv_layout")
        self._planned: PlannedAttention | None = None

    def plan(
        self,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = None,
        kv_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Fixes the lists of the next runs.

        Args:
            indptr: int32 [B + 1]: sequence b has the pages indices[indptr[b]:indptr[b + 1]].
            indices: int32 [indptr[B] or more].
            last_page_len: int32 [B]: tokens in the last page, 1 to page_size.
            q_data_type: refuses other queries; default: what run() is given. `data_type` is its
                old name.
        """
        names = ("indptr", "indices", "last_page_len")
        sequences = Sequences.paged(
            self._op, None, indptr, indices, last_page_len, page_size, names
        )
        self._planned = PlannedAttention(
            self._op,
            sequences,
            Heads(num_qo_heads, num_kv_heads, head_dim, head_dim),
            Scores(sm_scale, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta),
            layout=self._layout,
            q_data_type=data_type if q_data_type is None else q_data_type,
            window_left=window_left,
            decode=True,
        )

    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *,
        q_scale: float | None = None,
        k_scale: Any = None,
        v_scale: Any = None,
        sinks: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        pool: ThreadPool | None = None,
    ) -> Any:
        """Attention of q [B, num_qo_heads, head_dim], of the same kind, shape and dtype; with
        return_lse a pair with float32 [B, num_qo_heads].

        Args:
            k_scale, v_scale: what stored keys and values are multiplied by: a number, or float32 of
                the cache's shape without head_dim, one for each token and head.
            sinks: float32 [num_qo_heads]: the logit, neither scaled nor capped, of one more key
                whose value is zero; `lse` has it too.
            out, lse: where results go; C-contiguous.
        """
        planned = require_plan(self._planned, self._op)
        k, v = kv_views(self._op, paged_kv_cache, self._layout)
        return planned.run(
            q,
            k,
            v,
            out=out,
            lse=lse,
            return_lse=return_lse,
            lse_base=lse_base,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            sinks=sinks,
            pool=pool,
        )

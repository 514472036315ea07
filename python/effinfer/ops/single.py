"""Attention of one sequence over its contiguous keys, named as in FlashInfer; `decode` and
`prefill` describe what the arguments mean."""

from typing import Any

import numpy as np

from effinfer._core import Queue, ThreadPool
from effinfer.ops.shared.arrays import dense, dtype_name
from effinfer.ops.shared.masks import mask_options
from effinfer.ops.shared.options import Scores, expect, unsupported, view_3d
from effinfer.ops.shared.places import place_of
from effinfer.ops.shared.planned import plan_single


def single_decode_with_kv_cache(
    q: Any,
    k: Any,
    v: Any,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
    *,
    lse_base: str = "log2",
    pool: ThreadPool | Queue | None = None,
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
    at = place_of(q, pool, f"[{op}] q")
    shape = at.view(q, f"[{op}] q").shape
    expect(len(shape) == 2, f"[{op}] q", "2 dimensions", f"shape {shape}")
    planned, keys, values = plan_single(
        op,
        (1, *shape),
        k,
        v,
        kv_layout,
        Scores(sm_scale, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta),
        at,
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


def single_prefill_with_kv_cache(
    q: Any,
    k: Any,
    v: Any,
    scale_q: Any = None,
    scale_k: Any = None,
    scale_v: Any = None,
    o_dtype: Any = None,
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
    kv_cache_sf: Any = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    *,
    lse_base: str = "log2",
    q_scale: float | None = None,
    pool: ThreadPool | Queue | None = None,
) -> Any:
    """Attention of the rows of one sequence over its contiguous keys.

    Args:
        q: [qo_len, num_qo_heads, head_dim_qk].
        k, v: [kv_len, num_kv_heads, head_dim_qk or head_dim_vo] (NHD), or with the heads first
            (HND).
        scale_k, scale_v: float32 [num_kv_heads], one for each head, times k_scale and v_scale.
        o_dtype: the type of q, which results have.
        custom_mask: bool [qo_len, kv_len]; packed_custom_mask: uint8 [ceil(qo_len * kv_len / 8)].

    Returns:
        [qo_len, num_qo_heads, head_dim_vo]; with return_lse a pair with float32 [qo_len,
        num_qo_heads].
    """
    op = "single_prefill_with_kv_cache"
    unsupported(op, scale_q=scale_q, kv_cache_sf=kv_cache_sf)
    at = place_of(q, pool, f"[{op}] q")
    shape = view_3d(q, f"[{op}] q", at).shape
    heads_first = kv_layout == "HND"
    tokens, heads = view_3d(k, f"[{op}] k", at).shape[:2][:: -1 if heads_first else 1]
    rows, lengths = np.array([0, shape[0]], np.int32), np.array([tokens], np.int32)
    planned, keys, values = plan_single(
        op,
        shape,
        k,
        v,
        kv_layout,
        Scores(sm_scale, logits_soft_cap, pos_encoding_mode, rope_scale, rope_theta),
        at,
        q_data_type=o_dtype,
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
        k_scale=_of_heads(f"[{op}] scale_k", scale_k, k_scale, (tokens, heads)),
        v_scale=_of_heads(f"[{op}] scale_v", scale_v, v_scale, (tokens, heads)),
        pool=pool,
    )


def _of_heads(argument: str, scales: Any, factor: float | None, shape: tuple[int, int]) -> Any:
    """One scale for each token and head of scales of the heads, times a factor."""
    if scales is None:
        return factor
    heads = dense(scales, argument).reshape(-1)
    ok = heads.shape == shape[1:] and heads.dtype == np.float32
    expect(ok, argument, f"float32 {shape[1:]}", f"{dtype_name(heads.dtype)} {heads.shape}")
    return np.broadcast_to(heads * np.float32(1.0 if factor is None else factor), shape).copy()

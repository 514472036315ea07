"""Rotation and quantisation to 8-bit floats, by the names of flashinfer.rope.

Queries and keys come in two parts: `*_rope`, which rotates, and `*_nope`, which does not (None:
there is none). All are float32, float16 or bfloat16 [T, heads, dim]; keys of latent attention, with
one head, are [T, dim]. Arithmetic is float32, rounded once, after the scale; what the 8-bit type
cannot hold becomes its largest finite number. `enable_pdl` and `backend` have no effect.

Parameters that the operators share:

    cos_sin_cache   float32 [N, rope_dim]: rope_dim / 2 cosines, then the sines
    pos_ids         int32 or int64 [T], entries of the cache
    is_neox         pairs (i, i + rope_dim / 2), else (2i, 2i + 1)
    quantize_dtype  float8_e4m3fn or float8_e5m2, of any library; default: that of the outputs
                    given, else float8_e4m3fn
    quant_scale_q   what queries are multiplied by, positive; quant_scale_kv: keys and values
    *_out           where results go: of that type, any strides with contiguous rows
"""

from typing import Any

import numpy as np

from effinfer import _core
from effinfer._core import Queue, ThreadPool
from effinfer.ops.shared.arrays import AnyArray, dtype_name
from effinfer.ops.shared.float8 import float8_type, number, output, quantize, widened
from effinfer.ops.shared.options import LAYOUTS, errors_of, expect, indices, kv_views, one_of
from effinfer.ops.shared.places import AnyView, Place, place_of


@errors_of("rope_quantize_fp8")
def rope_quantize_fp8(
    q_rope: AnyArray,
    k_rope: AnyArray,
    q_nope: AnyArray | None,
    k_nope: AnyArray | None,
    cos_sin_cache: AnyArray,
    pos_ids: AnyArray,
    is_neox: bool = True,
    quantize_dtype: Any = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: AnyArray | None = None,
    k_rope_out: AnyArray | None = None,
    q_nope_out: AnyArray | None = None,
    k_nope_out: AnyArray | None = None,
    enable_pdl: bool = False,
    backend: str = "cuda",
    *,
    pool: ThreadPool | Queue | None = None,
) -> tuple[Any, Any, Any, Any]:
    """(q_rope, k_rope, q_nope, k_nope), the first two rotated, all times their scale in 8 bits;
    a part that there is none of is [T, heads, 0]."""
    op = "rope_quantize_fp8"
    given = {
        "q_rope_out": q_rope_out,
        "k_rope_out": k_rope_out,
        "q_nope_out": q_nope_out,
        "k_nope_out": k_nope_out,
    }
    at = place_of(q_rope, pool, f"[{op}] q_rope")
    dtype = _type_of(op, at, quantize_dtype, *given.values())
    scales = _scales(op, quant_scale_q, quant_scale_kv)
    parts = _rotated(op, at, q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox)
    results = [
        output(at, q_rope, part.shape, dtype, out, f"[{op}] {name}")
        for part, (name, out) in zip(parts, given.items(), strict=True)
    ]
    for part, (_, memory), (name, _), scale in zip(
        parts, results, given.items(), scales * 2, strict=True
    ):
        quantize(op, name, part, scale, memory, at)
    return results[0][0], results[1][0], results[2][0], results[3][0]


@errors_of("mla_rope_quantize_fp8")
def mla_rope_quantize_fp8(
    q_rope: AnyArray,
    k_rope: AnyArray,
    q_nope: AnyArray | None,
    k_nope: AnyArray | None,
    cos_sin_cache: AnyArray,
    pos_ids: AnyArray,
    is_neox: bool = True,
    quantize_dtype: Any = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    q_rope_out: AnyArray | None = None,
    k_rope_out: AnyArray | None = None,
    q_nope_out: AnyArray | None = None,
    k_nope_out: AnyArray | None = None,
    enable_pdl: bool = False,
    *,
    pool: ThreadPool | Queue | None = None,
) -> tuple[Any, Any, Any, Any]:
    """`rope_quantize_fp8` of latent attention: k_rope [T, rope_dim] and k_nope [T, dim]."""
    at = place_of(q_rope, pool, "[mla_rope_quantize_fp8] q_rope")
    rank = at.view(k_rope, "[mla_rope_quantize_fp8] k_rope").ndim
    expect(rank == 2, "[mla_rope_quantize_fp8] k_rope", "2 dimensions", rank)
    outputs = (q_rope_out, k_rope_out, q_nope_out, k_nope_out)
    parts = (q_rope, k_rope, q_nope, k_nope)
    scales = (quant_scale_q, quant_scale_kv)
    table = (cos_sin_cache, pos_ids, is_neox)
    return rope_quantize_fp8(*parts, *table, quantize_dtype, *scales, *outputs, pool=pool)


@errors_of("rope_quantize_fp8_append_paged_kv_cache")
def rope_quantize_fp8_append_paged_kv_cache(
    q_rope: AnyArray,
    k_rope: AnyArray,
    q_nope: AnyArray | None,
    k_nope: AnyArray | None,
    v: AnyArray | None,
    cos_sin_cache: AnyArray,
    pos_ids: AnyArray,
    paged_kv_cache: Any,
    kv_indices: AnyArray,
    kv_indptr: AnyArray,
    batch_indices: AnyArray,
    positions: AnyArray,
    is_neox: bool = True,
    quantize_dtype: Any = None,
    quant_scale_q: float = 1.0,
    quant_scale_kv: float = 1.0,
    page_size: int = 16,
    kv_layout: str = "NHD",
    q_rope_out: AnyArray | None = None,
    q_nope_out: AnyArray | None = None,
    enable_pdl: bool = False,
    *,
    pool: ThreadPool | Queue | None = None,
) -> tuple[Any, Any]:
    """`rope_quantize_fp8` whose keys, and values times quant_scale_kv, go to pages; returns
    (q_rope, q_nope).

    Args:
        v: [T, num_kv_heads, head_dim]; None in latent attention.
        paged_kv_cache: (k, v), whose keys are the rotated part and then the other one; in latent
            attention (k_nope, k_rope), pages [num_pages, page_size, dim]. Of quantize_dtype, whose
            default is theirs here.
        kv_indices, kv_indptr, batch_indices, positions: as of `append_paged_kv_cache`.
    """
    op = "rope_quantize_fp8_append_paged_kv_cache"
    one_of(kv_layout, LAYOUTS, f"[{op}] kv_layout")
    at = place_of(q_rope, pool, f"[{op}] q_rope")
    latent = at.view(k_rope, f"[{op}] k_rope").ndim == 2
    caches = kv_views(op, paged_kv_cache, kv_layout, 3 if latent else 4, at)
    chosen = quantize_dtype if quantize_dtype is not None else caches[0].dtype
    dtype = float8_type(chosen, f"[{op}] quantize_dtype")
    for got in (dtype_name(cache.dtype) for cache in caches):
        expect(got == dtype_name(dtype), f"[{op}] paged_kv_cache", dtype_name(dtype), got)
    scales = _scales(op, quant_scale_q, quant_scale_kv)
    parts = _rotated(op, at, q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox)
    ok = (v is None) == latent
    expect(ok, f"[{op}] v", "None with k_rope [T, dim], else an array", type(v).__name__)
    values = None if v is None else widened(op, "v", v, at)
    rows = _new_rows(op, at, (parts[1], parts[3]), values, scales[1], dtype)
    results = (
        output(at, q_rope, parts[0].shape, dtype, q_rope_out, f"[{op}] q_rope_out"),
        output(at, q_rope, parts[2].shape, dtype, q_nope_out, f"[{op}] q_nope_out"),
    )
    if latent:
        caches, kv_layout = (caches[0][:, :, None], caches[1][:, :, None]), "NHD"
    size = caches[0].shape[1 if kv_layout == "NHD" else 2]
    expect(size == page_size, f"[{op}] page_size", f"{size}, of the cache", page_size)
    # On a GPU nobody looks at lists: how much of a last page is used may be any numbers.
    lists = at.dense if at.on_gpu else indices
    starts = lists(kv_indptr, f"[{op}] kv_indptr")
    last = starts[:-1] if at.on_gpu else np.full(max(starts.size - 1, 0), size, np.int32)
    _core.append_paged_kv_cache(
        *rows,
        lists(batch_indices, f"[{op}] batch_indices"),
        lists(positions, f"[{op}] positions"),
        *caches,
        lists(kv_indices, f"[{op}] kv_indices"),
        starts,
        last,
        kv_layout=kv_layout,
        pool=at.executor,
    )
    for name, part, (_, memory) in zip(("q_rope", "q_nope"), parts[::2], results, strict=True):
        quantize(op, name, part, scales[0], memory, at)
    return results[0][0], results[1][0]


def _type_of(op: str, at: Place, given: Any, *outputs: Any) -> np.dtype[Any]:
    for out in outputs:
        if given is None and out is not None:
            given = at.view(out, f"[{op}] out").dtype
    return float8_type("float8_e4m3fn" if given is None else given, f"[{op}] quantize_dtype")


def _scales(op: str, q: Any, kv: Any) -> tuple[float, float]:
    return number(q, f"[{op}] quant_scale_q"), number(kv, f"[{op}] quant_scale_kv")


def _rotated(
    op: str,
    at: Place,
    q_rope: Any,
    k_rope: Any,
    q_nope: Any,
    k_nope: Any,
    cos_sin_cache: Any,
    pos_ids: Any,
    is_neox: bool,
) -> tuple[AnyView, AnyView, AnyView, AnyView]:
    """(q_rope, k_rope, q_nope, k_nope) in float32, the first two rotated in new memory."""
    q = widened(op, "q_rope", q_rope, at, copy=True)
    k = widened(op, "k_rope", k_rope, at, copy=True)
    expect(q.ndim == 3, f"[{op}] q_rope", "3 dimensions", f"shape {q.shape}")
    expect(k.ndim in (2, 3), f"[{op}] k_rope", "2 or 3 dimensions", f"shape {k.shape}")
    table = at.dense(cos_sin_cache, f"[{op}] cos_sin_cache")
    name = dtype_name(table.dtype)
    expect(name == "float32", f"[{op}] cos_sin_cache", "float32", name)
    heads = k if k.ndim == 3 else k[:, None]
    rows = at.dense(pos_ids, f"[{op}] pos_ids")
    with errors_of(op):
        _core.apply_rope(q, heads, table, rows, not is_neox, q, heads, at.executor)
    others = []
    for label, x, part in (("q_nope", q_nope, q), ("k_nope", k_nope, k)):
        wide = part[..., :0] if x is None else widened(op, label, x, at)
        expected = f"dimensions {part.shape[:-1]} before its last"
        expect(wide.shape[:-1] == part.shape[:-1], f"[{op}] {label}", expected, wide.shape)
        others.append(wide)
    return q, k, others[0], others[1]


def _new_rows(
    op: str,
    at: Place,
    keys: tuple[AnyView, AnyView],
    values: AnyView | None,
    scale: float,
    dtype: np.dtype[Any],
) -> tuple[AnyView, AnyView]:
    """What is appended to both caches, in 8 bits: [T, heads, dim] each."""
    rope, nope = keys
    if values is None:
        rows = [at.temporary((x.shape[0], 1, x.shape[1]), dtype) for x in (nope, rope)]
        quantize(op, "k_nope", nope, scale, rows[0][:, 0], at)
        quantize(op, "k_rope", rope, scale, rows[1][:, 0], at)
        return rows[0], rows[1]
    split = rope.shape[-1]
    both = at.temporary((*rope.shape[:-1], split + nope.shape[-1]), dtype)
    quantize(op, "k_rope", rope, scale, both[..., :split], at)
    quantize(op, "k_nope", nope, scale, both[..., split:], at)
    narrow = at.temporary(values.shape, dtype)
    quantize(op, "v", values, scale, narrow, at)
    return both, narrow

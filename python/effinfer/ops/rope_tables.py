"""Rotary position embeddings (arXiv:2104.09864): frequencies, tables, their application."""

from functools import partial
from typing import Any

import numpy as np

from effinfer import _core
from effinfer._core import InvalidArgumentError, Queue, ThreadPool
from effinfer.ops.shared.arrays import (
    AnyArray,
    ArrayT,
    Floats,
    dense,
    optional,
)
from effinfer.ops.shared.places import AnyView, Place, place_of


def rope_frequencies(
    dims: int,
    *,
    theta: float = 10000.0,
    scaling: str = "none",
    factor: float = 1.0,
    original_max_position: float = 0.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    attention_factor: float = 0.0,
    divisors: AnyArray | None = None,
) -> tuple[Floats, float]:
    """Frequencies of a rotary embedding, [dims / 2] in radians a position, and the factor on cos
    and sin.

    Args:
        dims: leading dimensions of a head that rotate, even.
        scaling: "none"; "linear" (position interpolation, arXiv:2306.15595); "llama3" (the Llama
            3.1 release: uses factor, original_max_position, low_freq_factor, high_freq_factor);
            "yarn" (arXiv:2309.00071, section 3: uses factor, original_max_position, beta_fast,
            beta_slow, attention_factor, where 0 means 0.1 ln(factor) + 1).
        divisors: [dims / 2], divide the frequencies: `rope_freqs.weight` of GGUF files.
    """
    return _core.rope_frequencies(
        dims,
        theta=theta,
        scaling=scaling,
        factor=factor,
        original_max_position=original_max_position,
        low_freq_factor=low_freq_factor,
        high_freq_factor=high_freq_factor,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        attention_factor=attention_factor,
        divisors=optional(divisors, "[rope_frequencies] divisors"),
    )


def rope_table(
    positions: ArrayT,
    inv_freq: AnyArray,
    factor: float = 1.0,
    *,
    pool: ThreadPool | Queue | None = None,
) -> ArrayT:
    """[T, 2, dims / 2]: cos and sin of positions [T] times inv_freq [dims / 2], times `factor`.

    With the positions 0, 1, ... and in the shape [T, dims] it is the `cos_sin_cache` of
    `apply_rope_with_cos_sin_cache`.
    """
    at = place_of(positions, pool, "[rope_table] positions")
    rows = at.dense(positions, "[rope_table] positions")
    frequencies = dense(inv_freq, "[rope_table] inv_freq")
    call = partial(_core.rope_table, rows, frequencies, factor, pool=at.executor)
    return at.made(positions, (*rows.shape, 2, *frequencies.shape), call)


Scaling = dict[str, Any]  # arguments of rope_frequencies


def linear(rope_scale: float, rope_theta: float) -> Scaling:
    return {"scaling": "linear", "theta": rope_theta, "factor": rope_scale}


def llama31(
    rope_scale: float, rope_theta: float, low_freq: float, high_freq: float, old_context: int
) -> Scaling:
    return {
        "scaling": "llama3",
        "theta": rope_theta,
        "factor": rope_scale,
        "low_freq_factor": low_freq,
        "high_freq_factor": high_freq,
        "original_max_position": old_context,
    }


def ragged_positions(
    q: AnyArray, indptr: AnyArray, offsets: AnyArray, pool: ThreadPool | Queue | None
) -> AnyArray:
    """int32 [T]: row indptr[s] + i of q stands at offsets[s] + i."""
    at = place_of(q, pool, "[apply_rope] q")
    rows = at.view(q, "[apply_rope] q").shape[:1]
    starts, first = (
        at.dense(indptr, "[apply_rope] indptr"),
        at.dense(offsets, "[apply_rope] offsets"),
    )
    count = rows[0] if rows else 0
    if not at.on_gpu:
        return _core.rope_positions(starts, first, count)
    positions, memory = at.empty(indptr, (count,), np.int32)
    _core.rope_positions(starts, first, count, at.executor, memory)
    return positions


def apply_scaled(
    q: ArrayT,
    k: ArrayT,
    positions: AnyArray,
    rotary_dim: int | None,
    interleave: bool,
    scaling: Scaling,
    in_place: bool,
    pool: ThreadPool | Queue | None,
) -> tuple[ArrayT, ArrayT]:
    """q and k rotated, in new arrays or in place, by the angles of their positions."""
    at = place_of(q, pool, "[apply_rope] q")
    heads = at.view(q, "[apply_rope] q"), at.view(k, "[apply_rope] k")
    if rotary_dim is None:
        rotary_dim = heads[0].shape[-1] if heads[0].ndim else 0
    inv_freq, factor = rope_frequencies(rotary_dim, **scaling)
    rows = at.dense(positions, "[apply_rope] pos_ids")
    outputs = _outputs(at, q, k, heads, in_place)
    made = outputs[0][1], outputs[1][1]
    if at.on_gpu:
        _core.apply_rope_pos_ids(*heads, inv_freq, factor, rows, interleave, *made, at.executor)
    else:
        angles = rope_table(rows, inv_freq, factor, pool=pool).reshape(-1, rotary_dim)
        _core.apply_rope(*heads, angles, None, interleave, *made, pool)
    return outputs[0][0], outputs[1][0]


def apply_table(
    positions: AnyArray,
    query: ArrayT,
    key: ArrayT,
    head_size: int,
    cos_sin_cache: AnyArray,
    is_neox: bool,
    in_place: bool,
    pool: ThreadPool | Queue | None,
) -> tuple[ArrayT, ArrayT]:
    """Rotates by the entries of a table, for heads that lie side by side."""
    at = place_of(query, pool, "[apply_rope] query")
    flat = at.view(query, "[apply_rope] query"), at.view(key, "[apply_rope] key")
    rows = at.dense(positions, "[apply_rope] positions")
    cache = at.dense(cos_sin_cache, "[apply_rope] cos_sin_cache")
    outputs = _outputs(at, query, key, flat, in_place)
    q, k = (_split_heads(x, head_size) for x in flat)
    q_out, k_out = (_split_heads(memory, head_size) for _, memory in outputs)
    _core.apply_rope(q, k, cache, rows, not is_neox, q_out, k_out, at.executor)
    return outputs[0][0], outputs[1][0]


def _outputs(
    at: Place, q: ArrayT, k: ArrayT, views: tuple[AnyView, AnyView], in_place: bool
) -> tuple[tuple[ArrayT, AnyView], tuple[ArrayT, AnyView]]:
    if in_place:
        memory = at.writable_view(q, "[apply_rope] q"), at.writable_view(k, "[apply_rope] k")
        return (q, memory[0]), (k, memory[1])
    return at.empty(q, views[0].shape), at.empty(k, views[1].shape)


def _split_heads(x: AnyView, head_size: int) -> AnyView:
    """[T, heads * head_size] as [T, heads, head_size], over the same memory."""
    if x.ndim != 2 or head_size < 1 or x.shape[1] % head_size != 0:
        raise InvalidArgumentError(
            f"[apply_rope] query, key: expected shape [T, heads * {head_size}], got {x.shape}"
        )
    return x.reshape((x.shape[0], x.shape[1] // head_size, head_size))

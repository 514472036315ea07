"""Rotary position embedding."""

from typing import Any

from effinfer import _core
from effinfer._core import ThreadPool
from effinfer.ops.arrays import AnyArray, ArrayT, Floats, as_kind, dense, optional


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
    positions: ArrayT, inv_freq: AnyArray, factor: float = 1.0, *, pool: ThreadPool | None = None
) -> ArrayT:
    """[T, 2, dims / 2]: cos and sin of positions int32 [T] times inv_freq [dims / 2]."""
    table = _core.rope_table(
        dense(positions, "[rope_table] positions"),
        dense(inv_freq, "[rope_table] inv_freq"),
        factor,
        pool=pool,
    )
    return as_kind(table, positions)


def rope(
    x: ArrayT,
    positions: AnyArray,
    *,
    dims: int | None = None,
    interleaved: bool = False,
    pool: ThreadPool | None = None,
    **parameters: Any,
) -> ArrayT:
    """Rotary position embedding (arXiv:2104.09864) of x [T, heads, head_dim].

    Args:
        positions: int32 [T].
        dims: leading dimensions of a head that rotate; default all. The rest is copied.
        interleaved: pairs (2i, 2i + 1), as in GGUF files of the llama family; else
            (i, i + dims / 2).
        parameters: theta, scaling, ... of `rope_frequencies`.
    """
    array = dense(x, "[rope] x")
    if dims is None:
        dims = array.shape[-1] if array.ndim else 0
    inv_freq, factor = rope_frequencies(dims, **parameters)
    table = rope_table(positions, inv_freq, factor, pool=pool)
    return as_kind(_core.rope(array, dense(table, "[rope] table"), interleaved, pool=pool), x)

"""The operators by themselves: numpy arrays in, new numpy arrays out, no model needed.

Arrays are float32 unless said otherwise; arrays that are not C-contiguous are copied first. Every
function takes `pool`, a `ThreadPool` to run on (default: one for the process). Errors:
`InvalidArgumentError` names the argument, what was expected and what was given.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from effinfer import _core
from effinfer._core import ThreadPool

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]


def _dense(array: npt.ArrayLike) -> Array:
    return np.asarray(array, order="C")


def rms_norm(
    x: Array,
    weight: Array | None,
    eps: float = 1e-6,
    groups: int = 1,
    *,
    pool: ThreadPool | None = None,
) -> Floats:
    """x / sqrt(mean(x^2) + eps) * weight over each group of a row (arXiv:1910.07467).

    Args:
        x: [..., groups * D].
        weight: [D]; None for ones.
        groups: vectors of a row that are normalised by themselves, as heads are in a q/k norm.

    A row's result is the same bits on every CPU, in any batch and for any number of threads.
    """
    scales = None if weight is None else _dense(weight)
    return _core.rms_norm(_dense(x), scales, eps, groups, pool=pool)


def add_rms_norm(
    x: Array,
    residual: Array,
    weight: Array | None,
    eps: float = 1e-6,
    *,
    pool: ThreadPool | None = None,
) -> tuple[Floats, Floats]:
    """(rms_norm(x + residual), x + residual) in one pass; x and residual [..., D], weight [D]."""
    scales = None if weight is None else _dense(weight)
    return _core.rms_norm(_dense(x), scales, eps, 1, _dense(residual), pool=pool)


def silu(x: Array, *, pool: ThreadPool | None = None) -> Floats:
    """x * sigmoid(x), any shape (arXiv:1702.03118)."""
    return _core.silu(_dense(x), pool=pool)


def gelu_tanh(x: Array, *, pool: ThreadPool | None = None) -> Floats:
    """The tanh form of GELU, any shape (arXiv:1606.08415)."""
    return _core.gelu_tanh(_dense(x), pool=pool)


def relu_squared(x: Array, *, pool: ThreadPool | None = None) -> Floats:
    """max(x, 0)^2, any shape (arXiv:2109.08668)."""
    return _core.relu_squared(_dense(x), pool=pool)


def softcap(x: Array, cap: float, *, pool: ThreadPool | None = None) -> Floats:
    """cap * tanh(x / cap), any shape, cap > 0 (arXiv:2408.00118, section 2)."""
    return _core.softcap(_dense(x), cap, pool=pool)


def scale(x: Array, factor: float, *, pool: ThreadPool | None = None) -> Floats:
    """x * factor, any shape."""
    return _core.scale(_dense(x), factor, pool=pool)


def add(a: Array, b: Array, *, pool: ThreadPool | None = None) -> Floats:
    """a + b, of one shape."""
    return _core.add(_dense(a), _dense(b), pool=pool)


def mul(a: Array, b: Array, *, pool: ThreadPool | None = None) -> Floats:
    """a * b, of one shape."""
    return _core.mul(_dense(a), _dense(b), pool=pool)


def embedding(
    ids: Array,
    table: Array,
    dtype: str | None = None,
    shape: tuple[int, int] | None = None,
    scale: float = 1.0,
    *,
    pool: ThreadPool | None = None,
) -> Floats:
    """scale * table[ids], rows decoded from the table's own type.

    Args:
        ids: int32 [T], each in [0, V).
        table: [V, D] float32 or float16; or, with `dtype` and `shape`, the bytes of a table of
            another type, as they lie in a GGUF file.
        dtype: "f32", "f16", "bf16" or a quantised type's name: "q8_0", "q4_k", ...
        shape: (V, D); D is a whole number of the type's blocks.

    Returns:
        float32 [T, D].
    """
    source = _dense(table)
    if dtype is None:
        dtype = {"float32": "f32", "float16": "f16"}.get(str(source.dtype), str(source.dtype))
    if shape is None:
        if source.ndim != 2:
            raise _core.InvalidArgumentError(
                f"[embedding] table: expected 2 dimensions or shape=(V, D), got {source.shape}"
            )
        shape = (source.shape[0], source.shape[1])
    rows, cols = shape
    return _core.embedding(_dense(ids), source, dtype, rows, cols, scale, pool=pool)


def select_rows(x: Array, rows: Array, *, pool: ThreadPool | None = None) -> Floats:
    """x[rows]: x [N, D], rows int32 [R] in [0, N); returns [R, D]."""
    return _core.select_rows(_dense(x), _dense(rows), pool=pool)


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
    divisors: Array | None = None,
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
        divisors=None if divisors is None else _dense(divisors),
    )


def rope_table(
    positions: Array, inv_freq: Array, factor: float = 1.0, *, pool: ThreadPool | None = None
) -> Floats:
    """[T, 2, dims / 2]: cos and sin of positions int32 [T] times inv_freq [dims / 2]."""
    return _core.rope_table(_dense(positions), _dense(inv_freq), factor, pool=pool)


def rope(
    x: Array,
    positions: Array,
    *,
    dims: int | None = None,
    interleaved: bool = False,
    pool: ThreadPool | None = None,
    **parameters: Any,
) -> Floats:
    """Rotary position embedding (arXiv:2104.09864) of x [T, heads, head_dim].

    Args:
        positions: int32 [T].
        dims: leading dimensions of a head that rotate; default all. The rest is copied.
        interleaved: pairs (2i, 2i + 1), as in GGUF files of the llama family; else
            (i, i + dims / 2).
        parameters: theta, scaling, ... of `rope_frequencies`.
    """
    if dims is None:
        dims = int(x.shape[-1]) if x.ndim else 0
    inv_freq, factor = rope_frequencies(dims, **parameters)
    table = rope_table(positions, inv_freq, factor, pool=pool)
    return _core.rope(_dense(x), table, interleaved, pool=pool)

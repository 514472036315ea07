"""The small operators: norms, activations, look-ups; arrays of any shape unless said otherwise."""

from effinfer import _core
from effinfer._core import ThreadPool
from effinfer.ops.arrays import Array, Floats, dense, optional


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
    normed: Floats = _core.rms_norm(dense(x), optional(weight), eps, groups, pool=pool)
    return normed


def add_rms_norm(
    x: Array,
    residual: Array,
    weight: Array | None,
    eps: float = 1e-6,
    *,
    pool: ThreadPool | None = None,
) -> tuple[Floats, Floats]:
    """(rms_norm(x + residual), x + residual) in one pass; x and residual [..., D], weight [D]."""
    both: tuple[Floats, Floats] = _core.rms_norm(
        dense(x), optional(weight), eps, 1, dense(residual), pool=pool
    )
    return both


def silu(x: Array, *, pool: ThreadPool | None = None) -> Floats:
    """x * sigmoid(x), any shape (arXiv:1702.03118)."""
    return _core.silu(dense(x), pool=pool)


def gelu_tanh(x: Array, *, pool: ThreadPool | None = None) -> Floats:
    """The tanh form of GELU, any shape (arXiv:1606.08415)."""
    return _core.gelu_tanh(dense(x), pool=pool)


def relu_squared(x: Array, *, pool: ThreadPool | None = None) -> Floats:
    """max(x, 0)^2, any shape (arXiv:2109.08668)."""
    return _core.relu_squared(dense(x), pool=pool)


def softcap(x: Array, cap: float, *, pool: ThreadPool | None = None) -> Floats:
    """cap * tanh(x / cap), any shape, cap > 0 (arXiv:2408.00118, section 2)."""
    return _core.softcap(dense(x), cap, pool=pool)


def scale(x: Array, factor: float, *, pool: ThreadPool | None = None) -> Floats:
    """x * factor, any shape."""
    return _core.scale(dense(x), factor, pool=pool)


def add(a: Array, b: Array, *, pool: ThreadPool | None = None) -> Floats:
    """a + b, of one shape."""
    return _core.add(dense(a), dense(b), pool=pool)


def mul(a: Array, b: Array, *, pool: ThreadPool | None = None) -> Floats:
    """a * b, of one shape."""
    return _core.mul(dense(a), dense(b), pool=pool)


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
    source = dense(table)
    if dtype is None:
        dtype = {"float32": "f32", "float16": "f16"}.get(str(source.dtype), str(source.dtype))
    if shape is None:
        if source.ndim != 2:
            raise _core.InvalidArgumentError(
                f"[embedding] table: expected 2 dimensions or shape=(V, D), got {source.shape}"
            )
        shape = (source.shape[0], source.shape[1])
    rows, cols = shape
    return _core.embedding(dense(ids), source, dtype, rows, cols, scale, pool=pool)


def select_rows(x: Array, rows: Array, *, pool: ThreadPool | None = None) -> Floats:
    """x[rows]: x [N, D], rows int32 [R] in [0, N); returns [R, D]."""
    return _core.select_rows(dense(x), dense(rows), pool=pool)

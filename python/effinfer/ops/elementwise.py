"""The small operators of float32 arrays of any shape, and look-ups."""

from functools import partial

from effinfer import _core
from effinfer._core import Queue, ThreadPool
from effinfer.ops.shared.arrays import AnyArray, ArrayT, as_kind, dense, file_type
from effinfer.ops.shared.places import place_of


def silu(x: ArrayT, *, pool: ThreadPool | Queue | None = None) -> ArrayT:
    """x * sigmoid(x), any shape (arXiv:1702.03118)."""
    return _unary("silu", x, pool=pool)


def gelu(x: ArrayT, *, pool: ThreadPool | Queue | None = None) -> ArrayT:
    """x / 2 * (1 + erf(x / sqrt(2))), any shape (arXiv:1606.08415)."""
    return _unary("gelu", x, pool=pool)


def gelu_tanh(x: ArrayT, *, pool: ThreadPool | Queue | None = None) -> ArrayT:
    """The tanh form of GELU, any shape (arXiv:1606.08415)."""
    return _unary("gelu_tanh", x, pool=pool)


def relu_squared(x: ArrayT, *, pool: ThreadPool | Queue | None = None) -> ArrayT:
    """max(x, 0)^2, any shape (arXiv:2109.08668)."""
    return _unary("relu_squared", x, pool=pool)


def sigmoid(x: ArrayT, *, pool: ThreadPool | Queue | None = None) -> ArrayT:
    """1 / (1 + e^-x), any shape; as a gate: arXiv:1612.08083."""
    return _unary("sigmoid", x, pool=pool)


def softcap(x: ArrayT, cap: float, *, pool: ThreadPool | Queue | None = None) -> ArrayT:
    """cap * tanh(x / cap), any shape, cap > 0 (arXiv:2408.00118, section 2)."""
    return _unary("softcap", x, cap, pool=pool)


def scale(x: ArrayT, factor: float, *, pool: ThreadPool | Queue | None = None) -> ArrayT:
    """x * factor, any shape."""
    return _unary("scale", x, factor, pool=pool)


def add(a: ArrayT, b: AnyArray, *, pool: ThreadPool | Queue | None = None) -> ArrayT:
    """a + b, of one shape."""
    return _binary("add", a, b, pool)


def mul(a: ArrayT, b: AnyArray, *, pool: ThreadPool | Queue | None = None) -> ArrayT:
    """a * b, of one shape."""
    return _binary("mul", a, b, pool)


def embedding(
    ids: AnyArray,
    table: ArrayT,
    dtype: str | None = None,
    shape: tuple[int, int] | None = None,
    scale: float = 1.0,
    *,
    pool: ThreadPool | None = None,
) -> ArrayT:
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
    source = dense(table, "[embedding] table")
    if dtype is None:
        dtype = file_type(source)
    if shape is None:
        if source.ndim != 2:
            raise _core.InvalidArgumentError(
                f"[embedding] table: expected 2 dimensions or shape=(V, D), got {source.shape}"
            )
        shape = (source.shape[0], source.shape[1])
    rows, cols = shape
    indices = dense(ids, "[embedding] ids")
    return as_kind(_core.embedding(indices, source, dtype, rows, cols, scale, pool=pool), table)


def select_rows(x: ArrayT, rows: AnyArray, *, pool: ThreadPool | Queue | None = None) -> ArrayT:
    """x[rows]: x [N, D], rows int32 [R] in [0, N); returns [R, D]."""
    at = place_of(x, pool, "[select_rows] x")
    source, picked = at.dense(x, "[select_rows] x"), at.dense(rows, "[select_rows] rows")
    shape = (*picked.shape, *source.shape[1:])
    call = partial(_core.select_rows, source, picked, pool=at.executor)
    return at.made(x, shape, call)


def _unary(name: str, x: ArrayT, *parameter: float, pool: ThreadPool | Queue | None) -> ArrayT:
    at = place_of(x, pool, f"[{name}] x")
    values = at.dense(x, f"[{name}] x")
    call = partial(getattr(_core, name), values, *parameter, pool=at.executor)
    return at.made(x, values.shape, call)


def _binary(name: str, a: ArrayT, b: AnyArray, pool: ThreadPool | Queue | None) -> ArrayT:
    at = place_of(a, pool, f"[{name}] a")
    left, right = at.dense(a, f"[{name}] a"), at.dense(b, f"[{name}] b")
    return at.made(a, left.shape, partial(getattr(_core, name), left, right, pool=at.executor))

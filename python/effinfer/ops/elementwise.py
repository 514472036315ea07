"""The small operators of float32 arrays of any shape, and look-ups."""

from effinfer import _core
from effinfer._core import ThreadPool
from effinfer.ops.shared.arrays import AnyArray, ArrayT, as_kind, dense, file_type


def silu(x: ArrayT, *, pool: ThreadPool | None = None) -> ArrayT:
    """x * sigmoid(x), any shape (arXiv:1702.03118)."""
    return as_kind(_core.silu(dense(x, "[silu] x"), pool=pool), x)


def gelu(x: ArrayT, *, pool: ThreadPool | None = None) -> ArrayT:
    """x / 2 * (1 + erf(x / sqrt(2))), any shape (arXiv:1606.08415)."""
    return as_kind(_core.gelu(dense(x, "[gelu] x"), pool=pool), x)


def gelu_tanh(x: ArrayT, *, pool: ThreadPool | None = None) -> ArrayT:
    """The tanh form of GELU, any shape (arXiv:1606.08415)."""
    return as_kind(_core.gelu_tanh(dense(x, "[gelu_tanh] x"), pool=pool), x)


def relu_squared(x: ArrayT, *, pool: ThreadPool | None = None) -> ArrayT:
    """max(x, 0)^2, any shape (arXiv:2109.08668)."""
    return as_kind(_core.relu_squared(dense(x, "[relu_squared] x"), pool=pool), x)


def sigmoid(x: ArrayT, *, pool: ThreadPool | None = None) -> ArrayT:
    """1 / (1 + e^-x), any shape; as a gate: arXiv:1612.08083."""
    return as_kind(_core.sigmoid(dense(x, "[sigmoid] x"), pool=pool), x)


def softcap(x: ArrayT, cap: float, *, pool: ThreadPool | None = None) -> ArrayT:
    """cap * tanh(x / cap), any shape, cap > 0 (arXiv:2408.00118, section 2)."""
    return as_kind(_core.softcap(dense(x, "[softcap] x"), cap, pool=pool), x)


def scale(x: ArrayT, factor: float, *, pool: ThreadPool | None = None) -> ArrayT:
    """x * factor, any shape."""
    return as_kind(_core.scale(dense(x, "[scale] x"), factor, pool=pool), x)


def add(a: ArrayT, b: AnyArray, *, pool: ThreadPool | None = None) -> ArrayT:
    """a + b, of one shape."""
    return as_kind(_core.add(dense(a, "[add] a"), dense(b, "[add] b"), pool=pool), a)


def mul(a: ArrayT, b: AnyArray, *, pool: ThreadPool | None = None) -> ArrayT:
    """a * b, of one shape."""
    return as_kind(_core.mul(dense(a, "[mul] a"), dense(b, "[mul] b"), pool=pool), a)


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


def select_rows(x: ArrayT, rows: AnyArray, *, pool: ThreadPool | None = None) -> ArrayT:
    """x[rows]: x [N, D], rows int32 [R] in [0, N); returns [R, D]."""
    picked = dense(rows, "[select_rows] rows")
    return as_kind(_core.select_rows(dense(x, "[select_rows] x"), picked, pool=pool), x)

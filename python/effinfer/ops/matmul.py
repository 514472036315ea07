"""Products with packed, possibly quantised weights."""

import numpy as np

from effinfer import _core
from effinfer._core import PackedMatrix, Queue, ThreadPool, UnsupportedError
from effinfer.ops.shared.arrays import AnyArray, ArrayT, as_kind, dense, file_type, optional
from effinfer.ops.shared.places import place_of


def pack(
    table: AnyArray,
    dtype: str | None = None,
    shape: tuple[int, int] | None = None,
    *,
    ternary: str | None = None,
    pool: ThreadPool | None = None,
) -> PackedMatrix:
    """Packs a weight once into the layout that all kernels read; exact.

    Args:
        table: [N, K] float32 or float16; or, with `dtype` and `shape`, the bytes of a tensor of
            another type, as they lie in a GGUF file.
        dtype: "f32", "f16", "bf16" or a quantised type's name: "q4_0", "q6_k", ...
        shape: (N, K): outputs and inputs; K is a whole number of the type's blocks.
        ternary: "t2" or "t1_6" packs a ternary type at 2 or 1.6 bits a weight, for the arithmetic
            "int8_token"; None packs it for the others.

    Returns:
        A `PackedMatrix`: `shape`, `dtype`, `format`, `num_bytes`, and `unpack()`, which gives
        the values back bit for bit. Raises `OutOfMemoryError`.
    """
    source = dense(table, "[pack] table")
    name = dtype or file_type(source)
    return PackedMatrix(source, name, source.shape if shape is None else shape, pool, ternary)


def quantized_matmul(
    x: ArrayT,
    weight: PackedMatrix,
    arithmetic: str = "int8",
    *,
    bias: AnyArray | None = None,
    residual: AnyArray | None = None,
    method: str = "auto",
    pool: ThreadPool | Queue | None = None,
) -> ArrayT:
    """x @ weight.T + bias + residual.

    Args:
        x: [T, K].
        arithmetic: "int8": x is rounded to int8 with a scale for each 16 values and sums are exact,
            so that a row's result is the same bits for any T and on any device (quantised weights
            only); "bf16":
            weights and x rounded to bfloat16, sums in float32; "f32": float32 throughout;
            "int8_token": x is rounded to int8 with one scale for each row and sums are exact, the
            same bits for both packings (weights packed with `ternary` only).
        bias: [N].
        residual: [T, N].
        weight: on a GPU with x: `weight.to("cuda:0")`.
        method: of "int8_token": "integer" multiplies, "lookup" looks sums up in tables, "auto"
            is the faster one; all give the same bits.

    Returns:
        float32 [T, N]. Raises `UnsupportedError` when no kernel of the current instruction-set
        level fits, with the reason of each.
    """
    at = place_of(x, pool, "[matmul] x")
    if isinstance(at.executor, Queue):
        if method != "auto":
            raise UnsupportedError(f"[matmul] method: expected auto on a GPU, got {method}")
        rows = at.dense(x, "[matmul] x")
        product, memory = at.empty(x, (*rows.shape[:1], weight.shape[0]), np.float32)
        more = at.optional(bias, "[matmul] bias"), at.optional(residual, "[matmul] residual")
        _core.matmul_there(rows, weight, memory, at.executor, arithmetic, *more)
        return product
    made = _core.matmul(
        dense(x, "[matmul] x"),
        weight,
        arithmetic,
        pool=at.executor,
        bias=optional(bias, "[matmul] bias"),
        residual=optional(residual, "[matmul] residual"),
        method=method,
    )
    return as_kind(made, x)


def quantize_activation(x: ArrayT) -> tuple[ArrayT, ArrayT]:
    """The int8 operand that `quantized_matmul` makes of x [T, K].

    Returns:
        (q int8 [T, K], scales float32 [T, ceil(K / 16)]): value = scales[t, k // 16] * q[t, k],
        scale = max |x| / 127 of its block of 32, q rounded to nearest even.
    """
    q, scales = _core.quantize_activation(dense(x, "[quantize_activation] x"))
    return as_kind(q, x), as_kind(scales, x)


def quantize_tokens(x: ArrayT) -> tuple[ArrayT, ArrayT]:
    """The int8_token operand that `quantized_matmul` makes of x [T, K].

    Returns:
        (q int8 [T, K], scales float32 [T]): value = scales[t] * q[t, k], scale = max |x| / 127 of
        the row, q rounded to nearest even.
    """
    q, scales = _core.quantize_tokens(dense(x, "[quantize_tokens] x"))
    return as_kind(q, x), as_kind(scales, x)

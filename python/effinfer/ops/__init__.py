"""The operators by themselves: numpy arrays in, new numpy arrays out, no model needed.

Arrays are float32 unless said otherwise; arrays that are not C-contiguous are copied first. Every
operator takes `pool`, a `ThreadPool` to run on (default: one for the process), and releases the
GIL while it works. Errors: `InvalidArgumentError` names the argument, what was expected and what
was given.
"""

from effinfer._core import PackedMatrix, PagedKv, ThreadPool
from effinfer.ops.arrays import bfloat16, float8_e4m3fn, float8_e5m2
from effinfer.ops.attention import kv_append, paged_attention, rope_append
from effinfer.ops.elementwise import (
    add,
    add_rms_norm,
    embedding,
    gelu_tanh,
    mul,
    relu_squared,
    rms_norm,
    scale,
    select_rows,
    silu,
    softcap,
)
from effinfer.ops.matmul import matmul, pack, quantize_activation
from effinfer.ops.rope import rope, rope_frequencies, rope_table

__all__ = [
    "PackedMatrix",
    "PagedKv",
    "ThreadPool",
    "add",
    "add_rms_norm",
    "bfloat16",
    "embedding",
    "float8_e4m3fn",
    "float8_e5m2",
    "gelu_tanh",
    "kv_append",
    "matmul",
    "mul",
    "pack",
    "paged_attention",
    "quantize_activation",
    "relu_squared",
    "rms_norm",
    "rope",
    "rope_append",
    "rope_frequencies",
    "rope_table",
    "scale",
    "select_rows",
    "silu",
    "softcap",
]

"""Single operators of ggml, by the C functions of the libraries inside llama-cpp-python."""

import ctypes
from ctypes import c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from protocol import serve
from timing import median_seconds

LIBRARIES = Path(llama_cpp.__file__).parent / "lib"
BASE = ctypes.CDLL(str(LIBRARIES / "libggml-base.so"))
CPU = ctypes.CDLL(str(LIBRARIES / "libggml-cpu.so"))
TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14,
    "BF16": 30, "TQ1_0": 34, "TQ2_0": 35,
}  # fmt: skip
BUFFER_OFFSET = 8  # of ggml_tensor.buffer, after the type
MASK_ROWS = 64  # ggml wants the mask's rows padded to a multiple of this
LAYERS = 4


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


def function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Any:
    found = getattr(library, name)
    found.restype, found.argtypes = result, arguments
    return found


P = c_void_p
init = function(BASE, "ggml_init", P, InitParams)
free = function(BASE, "ggml_free", None, P)
new_tensor = function(BASE, "ggml_new_tensor_3d", P, P, c_int, c_int64, c_int64, c_int64)
data_of = function(BASE, "ggml_get_data", P, P)
bytes_of = function(BASE, "ggml_nbytes", c_size_t, P)
mul_mat = function(BASE, "ggml_mul_mat", P, P, P, P)
flash_attention = function(
    BASE, "ggml_flash_attn_ext", P, P, P, P, P, P, c_float, c_float, c_float
)  # fmt: skip
new_graph = function(BASE, "ggml_new_graph", P, P)
expand = function(BASE, "ggml_build_forward_expand", None, P, P)
quantize_chunk = function(
    BASE, "ggml_quantize_chunk", c_size_t, c_int, P, P, c_int64, c_int64, c_int64, P
)  # fmt: skip
row_size = function(BASE, "ggml_row_size", c_size_t, c_int, c_int64)
compute = function(BASE, "ggml_backend_graph_compute", c_int, P, P)
reg_device = function(BASE, "ggml_backend_reg_dev_get", P, P, c_size_t)
reg_function = function(BASE, "ggml_backend_reg_get_proc_address", P, P, c_char_p)
supports = function(BASE, "ggml_backend_dev_supports_op", c_bool, P, P)
empty_buffer = function(BASE, "ggml_backend_buft_alloc_buffer", P, P, c_size_t)
alloc_tensors = function(BASE, "ggml_backend_alloc_ctx_tensors_from_buft", P, P, P)
free_buffer = function(BASE, "ggml_backend_buffer_free", None, P)
tensor_set = function(BASE, "ggml_backend_tensor_set", None, P, P, c_size_t, c_size_t)
cpu_backend = function(CPU, "ggml_backend_cpu_init", P)
set_threads = function(CPU, "ggml_backend_cpu_set_n_threads", None, P, c_int)
cpu_reg = function(CPU, "ggml_backend_cpu_reg", P)


def fill(tensor: int, values: np.ndarray) -> None:
    assert bytes_of(tensor) == values.nbytes
    ctypes.memmove(data_of(tensor), values.ctypes.data, values.nbytes)


def extra_buffer_types(registry: int) -> list[int]:
    """Where the CPU keeps weights in other layouts than the file's."""
    address = reg_function(registry, b"ggml_backend_dev_get_extra_bufts")
    if not address:
        return []
    listed = ctypes.CFUNCTYPE(ctypes.POINTER(P), P)(address)(reg_device(registry, 0))
    found = []
    for pointer in listed or ():
        if not pointer:
            break
        found.append(pointer)
    return found


class Worker:
    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        self.repack = request.get("repack", True)
        self.ternary_type = request.get("ternary")
        self.backend = cpu_backend()
        set_threads(self.backend, request["threads"])
        return {"seconds": 0.0, "version": version("llama_cpp_python")}

    def quantize(self, request: dict[str, Any]) -> dict[str, Any]:
        side, dtype = request["side"], TYPES[request["dtype"]]
        values = np.random.default_rng(1).standard_normal((side, side), np.float32)
        out = np.empty(side * row_size(dtype, side), np.uint8)
        quantize_chunk(dtype, values.ctypes.data, out.ctypes.data, 0, side, side, None)
        out.tofile(request["path"])
        return {}

    def quantize_ternary(self, request: dict[str, Any]) -> dict[str, Any]:
        rows, cols, dtype = request["rows"], request["cols"], TYPES[request["dtype"]]
        values = np.random.default_rng(1).integers(-1, 2, (rows, cols)).astype(np.float32)
        out = np.empty(rows * row_size(dtype, cols), np.uint8)
        quantize_chunk(dtype, values.ctypes.data, out.ctypes.data, 0, rows, cols, None)
        out.tofile(request["path"])
        return {}

    def ternary(self, request: dict[str, Any]) -> dict[str, Any]:
        """One product, with copies of the matrix in turn."""
        rows, cols, tokens = request["rows"], request["cols"], request["n"]
        data = np.fromfile(request["path"] + self.ternary_type, np.uint8)
        copies = request["copies"]
        size = copies * (data.nbytes + 4 * rows * tokens + (1 << 19)) + (1 << 24)
        context = init(InitParams(size, None, False))
        try:
            x = new_tensor(context, TYPES["F32"], cols, tokens, 1)
            fill(x, np.random.default_rng(0).standard_normal((tokens, cols), np.float32))
            graphs = []
            for _ in range(copies):
                weight = new_tensor(context, TYPES[self.ternary_type], cols, rows, 1)
                fill(weight, data)
                graphs.append(new_graph(context))
                expand(graphs[-1], mul_mat(context, weight, x))
            turn = cycle(graphs)
            call = lambda: compute(self.backend, next(turn))  # noqa: E731
            return {"seconds": median_seconds(call, request["seconds"])}
        finally:
            free(context)

    def time(self, context: int, result: int, seconds: float) -> float:
        graph = new_graph(context)
        expand(graph, result)

        def call() -> None:
            if compute(self.backend, graph) != 0:
                raise RuntimeError("ggml_backend_graph_compute failed")

        return median_seconds(call, seconds)

    def matmul(self, request: dict[str, Any]) -> dict[str, Any]:
        side, tokens, dtype = request["side"], request["n"], TYPES[request["dtype"]]
        data = np.fromfile(request["path"], np.uint8)
        weights = init(InitParams(data.nbytes + (1 << 20), None, self.repack))
        context = init(InitParams(8 * side * tokens + (1 << 22), None, False))
        buffer = None
        try:
            weight = new_tensor(weights, dtype, side, side, 1)
            x = new_tensor(context, TYPES["F32"], side, tokens, 1)
            fill(x, np.random.default_rng(0).standard_normal((tokens, side), np.float32))
            result = mul_mat(context, weight, x)
            if self.repack:
                buffer = alloc_tensors(weights, self.layout(weight, result, request["dtype"]))
                tensor_set(weight, data.ctypes.data, 0, data.nbytes)
            else:
                fill(weight, data)
            return {"seconds": self.time(context, result, request["seconds"])}
        finally:
            free(context)
            free(weights)
            if buffer:
                free_buffer(buffer)

    def layout(self, weight: int, result: int, dtype: str) -> int:
        """The buffer type that llama.cpp would choose: the first whose kernels take the product."""
        registry = cpu_reg()
        field = c_void_p.from_address(weight + BUFFER_OFFSET)
        for kind in extra_buffer_types(registry):
            field.value = probe = empty_buffer(kind, 0)
            supported = supports(reg_device(registry, 0), result)
            field.value = None
            free_buffer(probe)
            if supported:
                return kind
        raise ValueError(f"no interleaved layout for {dtype}")

    def attention(self, request: dict[str, Any]) -> dict[str, Any]:
        rows, length, dim = request["n"], request["length"], request["head_dim"]
        heads, kv_heads = request["heads"], request["kv_heads"]
        rng = np.random.default_rng(0)
        context = init(InitParams(1 << 28, None, False))
        try:
            q = new_tensor(context, TYPES["F32"], dim, rows, heads)
            fill(q, rng.standard_normal((heads, rows, dim), np.float32))
            mask = self.causal_mask(context, rows, length) if rows > 1 else None
            graph = new_graph(context)
            kv = rng.standard_normal((kv_heads, length, dim)).astype(np.float16)
            for _ in range(LAYERS):
                keys = new_tensor(context, TYPES["F16"], dim, length, kv_heads)
                values = new_tensor(context, TYPES["F16"], dim, length, kv_heads)
                fill(keys, kv)
                fill(values, kv)
                result = flash_attention(context, q, keys, values, mask, dim**-0.5, 0, 0)
                expand(graph, result)
            call = lambda: compute(self.backend, graph)  # noqa: E731
            return {"seconds": median_seconds(call, request["seconds"]) / LAYERS}
        finally:
            free(context)

    @staticmethod
    def causal_mask(context: int, rows: int, length: int) -> int:
        padded = -(-rows // MASK_ROWS) * MASK_ROWS
        mask = new_tensor(context, TYPES["F16"], length, padded, 1)
        hidden = np.arange(length) > np.arange(padded)[:, None] + length - rows
        fill(mask, np.where(hidden, -np.inf, 0).astype(np.float16))
        return int(mask)


if __name__ == "__main__":
    worker = Worker()
    serve(
        {
            "load": worker.load,
            "quantize": worker.quantize,
            "quantize_ternary": worker.quantize_ternary,
            "ternary": worker.ternary,
            "matmul": worker.matmul,
            "attention": worker.attention,
        }
    )

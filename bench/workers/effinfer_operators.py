"""Single operators of effinfer, in the arithmetic that its engine chooses."""

from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from library_cases import library_case
from protocol import serve
from timing import median_seconds

from effinfer import _core, ops

PAGE = 64
LAYERS = 4  # KV of several layers visited in turn: a real step finds none in the first cache
DECODE_ROWS = 16
FLOATS = ("F16", "BF16")


def arithmetic(dtype: str, tokens: int) -> str:
    """As the compiler does: int8 to decode quantised weights; to prefill the panels of what becomes
    queries, keys and values."""
    if tokens <= DECODE_ROWS:
        return "f32" if dtype in FLOATS else "int8"
    return "bf16" if prefills_in_bf16() else "f32"


def prefills_in_bf16() -> bool:
    level = _core.current_isa()
    return level == "amx" or (level == "avx512" and _core.has_fast_bf16())


class Worker:
    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        self.pool = _core.ThreadPool(request["threads"])
        self.held: tuple[str, Any] = ("", None)
        self.packing, self.method = request.get("packing"), request.get("method", "auto")
        self.kv_dtype = request.get("kv_dtype", "bf16")
        self.arithmetic = request.get("arithmetic")  # None: what the engine would use
        return {"seconds": 0.0, "version": _core.version(), "isa": _core.current_isa()}

    def matmul(self, request: dict[str, Any]) -> dict[str, Any]:
        dtype, side, tokens = request["dtype"], request["side"], request["n"]
        if self.arithmetic == "int8" and dtype in FLOATS:
            raise ValueError(f"{dtype} weights are not multiplied in int8")
        if self.held[0] != dtype:
            data = np.frombuffer(Path(request["path"]).read_bytes(), np.uint8)
            packed = _core.PackedMatrix(data, dtype.lower(), (side, side), self.pool)
            self.held = (dtype, packed)
        x = np.random.default_rng(0).standard_normal((tokens, side), np.float32)
        weight, kind = self.held[1], self.arithmetic or arithmetic(dtype, tokens)
        seconds = median_seconds(
            lambda: _core.matmul(x, weight, kind, self.pool), request["seconds"]
        )
        return {"seconds": seconds}

    def ternary(self, request: dict[str, Any]) -> dict[str, Any]:
        """One product, with copies of the matrix in turn."""
        shape, copies = (request["rows"], request["cols"]), request["copies"]
        if self.held[0] != f"ternary {copies}":
            data = np.fromfile(request["path"] + "TQ2_0", np.uint8)
            packed = [
                _core.PackedMatrix(data, "tq2_0", shape, self.pool, self.packing)
                for _ in range(copies)
            ]
            self.held = (f"ternary {copies}", packed)
        x = np.random.default_rng(0).standard_normal((request["n"], shape[1]), np.float32)
        turn = cycle(self.held[1])
        seconds = median_seconds(
            lambda: _core.matmul(x, next(turn), "int8_token", self.pool, method=self.method),
            request["seconds"],
        )
        return {"seconds": seconds}

    def attention(self, request: dict[str, Any]) -> dict[str, Any]:
        rows, length, dim = request["n"], request["length"], request["head_dim"]
        pages = -(-length // PAGE)
        kv = _core.PagedKv(pages * LAYERS, request["kv_heads"], dim, self.kv_dtype)
        rng = np.random.default_rng(0)
        k = rng.standard_normal((length, request["kv_heads"], dim), np.float32)
        q = rng.standard_normal((rows, request["heads"], dim), np.float32)
        q_ptr, kv_ptr, page_ptr = (np.array([0, n], np.int32) for n in (rows, length, pages))
        tokens = np.array([length], np.int32)
        lists = [np.arange(i * pages, (i + 1) * pages, dtype=np.int32) for i in range(LAYERS)]
        for pages_of_layer in lists:
            _core.kv_append(kv, k, k, kv_ptr, page_ptr, pages_of_layer, tokens)

        in_bf16 = self.kv_dtype == "bf16" and rows > DECODE_ROWS and prefills_in_bf16()
        kind = "bf16" if in_bf16 else "f32"

        def all_layers() -> None:
            for pages_of_layer in lists:
                ops.paged_attention(
                    q, kv, q_ptr, page_ptr, pages_of_layer, tokens, arithmetic=kind, pool=self.pool
                )

        return {"seconds": median_seconds(all_layers, request["seconds"]) / LAYERS}

    def sampling(self, request: dict[str, Any]) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        shape = (request["batch"], request["vocab"])
        logits = rng.standard_normal(shape, np.float32) * np.float32(request["spread"])
        top_k, top_p = request["top_k"] or request["vocab"], request["top_p"]

        def call() -> None:
            ops.top_k_top_p_sampling_from_logits(logits, top_k, top_p, seed=1, pool=self.pool)

        return {"seconds": median_seconds(call, request["seconds"])}

    def library(self, request: dict[str, Any]) -> dict[str, Any]:
        seconds = median_seconds(library_case(request, self.pool), request["seconds"])
        return {"seconds": seconds}


if __name__ == "__main__":
    worker = Worker()
    names = ("load", "matmul", "ternary", "attention", "sampling", "library")
    serve({name: getattr(worker, name) for name in names})

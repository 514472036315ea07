"""Time of paged attention: decode and prefill shapes, every KV dtype, every ISA level.

Usage: python bench/attention_bench.py [--threads N] [--isa LEVEL] [--dtype bf16]
Prints the median microseconds of a call (planning included), the KV bytes that it reads a second
(decode) or its multiply-adds a second (prefill).
"""

import argparse
import time
from itertools import product

import numpy as np

from effinfer import _core, testing

PAGE = 64
# query heads, KV heads, head_dim; query rows, tokens in the cache
HEADS = [(9, 3, 64), (20, 5, 128)]
STEPS = [(1, 512), (1, 4096), (8, 4096), (512, 512)]
BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i8": 1}


def measure(heads, kv_heads, head_dim, rows, length, dtype, pool) -> float:
    rng = np.random.default_rng(0)
    pages = -(-length // PAGE)
    # Several layers' worth of pages, visited in turn: a real step finds no layer's KV in L1.
    layers = 8
    kv = _core.PagedKv(pages * layers, kv_heads, head_dim, dtype)
    k = rng.standard_normal((length, kv_heads, head_dim), np.float32)
    q = rng.standard_normal((rows, heads, head_dim), np.float32)
    indptr = [np.array([0, n], np.int32) for n in (rows, length, pages)]
    tokens = np.array([length], np.int32)
    lists = [np.arange(i * pages, (i + 1) * pages, dtype=np.int32) for i in range(layers)]
    for pages_of_layer in lists:
        _core.kv_append(kv, k, k, indptr[1], indptr[2], pages_of_layer, tokens)

    def call(i: int) -> None:
        _core.paged_attention(
            q, kv, indptr[0], indptr[2], lists[i % layers], tokens, head_dim**-0.5, pool=pool
        )

    for i in range(layers):
        call(i)
    times = []
    stop = time.perf_counter() + 0.5
    while time.perf_counter() < stop:
        start = time.perf_counter()
        for i in range(layers):
            call(i)
        times.append((time.perf_counter() - start) / layers)
    return float(np.median(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--isa", choices=testing.available_isas())
    parser.add_argument("--dtype", choices=sorted(BYTES))
    arguments = parser.parse_args()
    pool = _core.ThreadPool(arguments.threads)
    levels = [arguments.isa] if arguments.isa else testing.available_isas()
    dtypes = [arguments.dtype] if arguments.dtype else list(BYTES)
    print(f"{pool.size} threads, {_core.cpu_model()}")
    for level, dtype in product(levels, dtypes):
        with testing.isa(level):
            for (heads, kv_heads, dim), (rows, length) in product(HEADS, STEPS):
                seconds = measure(heads, kv_heads, dim, rows, length, dtype, pool)
                if rows < 512:
                    rate = 2 * length * kv_heads * dim * BYTES[dtype] / seconds / 1e9
                    unit = "GB/s"
                else:
                    rate = rows * (rows + 1) / 2 * heads * dim * 4 / seconds / 1e9
                    unit = "GFLOP/s"
                shape = f"{heads}/{kv_heads} x {dim}, {rows} rows of {length}"
                print(f"{level:9}{dtype:6}{shape:32}{seconds * 1e6:9.1f} us {rate:8.1f} {unit}")


if __name__ == "__main__":
    main()

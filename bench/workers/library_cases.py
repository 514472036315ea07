"""Calls of `effinfer.ops` that the library section times."""

from collections.abc import Callable
from typing import Any

import numpy as np

from effinfer import _core, ops

PAGE = 16
BLOCK = 64
UNSHARED = 64  # tokens of its own that each request has behind the common prefix


def library_case(request: dict[str, Any], pool: _core.ThreadPool) -> Callable[[], Any]:
    return CASES[request["case"]](request, pool)


def numbers(request: dict[str, Any], *shape: int) -> Any:
    """Of the request's dtype: bfloat16 by dropping the lower halves of floats."""
    values = np.random.default_rng(0).standard_normal(shape, np.float32)
    if request["dtype"] == "f32":
        return values
    return np.ascontiguousarray(values.view(np.uint16)[..., 1::2]).view(ops.bfloat16)


def heads(request: dict[str, Any]) -> tuple[int, int, int]:
    return request["heads"], request["kv_heads"], request["head_dim"]


def int32(values: Any) -> Any:
    return np.asarray(values, np.int32)


def paged(request: dict[str, Any], pool: _core.ThreadPool) -> Callable[[], Any]:
    """Sequences of `length` tokens in shuffled pages, `rows` queries at the end of each."""
    batch, rows, pages = request["batch"], request["rows"], request["length"] // PAGE
    qo_heads, kv_heads, dim = heads(request)
    cache = (
        numbers(request, batch * pages, PAGE, kv_heads, dim),
        numbers(request, batch * pages, PAGE, kv_heads, dim),
    )
    q = numbers(request, batch * rows, qo_heads, dim)
    wrapper = ops.BatchPrefillWithPagedKVCacheWrapper(None)
    wrapper.plan(
        int32(np.arange(batch + 1) * rows),
        int32(np.arange(batch + 1) * pages),
        int32(np.random.default_rng(1).permutation(batch * pages)),
        int32([PAGE] * batch),
        qo_heads,
        kv_heads,
        dim,
        PAGE,
        causal=True,
    )
    return lambda: wrapper.run(q, cache, pool=pool)


def cascade(request: dict[str, Any], pool: _core.ThreadPool) -> Callable[[], Any]:
    """The batch's requests share all but their last tokens."""
    batch, shared = request["batch"], (request["length"] - UNSHARED) // PAGE
    own = UNSHARED // PAGE
    qo_heads, kv_heads, dim = heads(request)
    pages = shared + batch * own
    cache = (
        numbers(request, pages, PAGE, kv_heads, dim),
        numbers(request, pages, PAGE, kv_heads, dim),
    )
    q = numbers(request, batch, qo_heads, dim)
    wrapper = ops.MultiLevelCascadeAttentionWrapper(2)
    wrapper.plan(
        [int32([0, batch]), int32(np.arange(batch + 1))],
        [int32([0, shared]), int32(np.arange(batch + 1) * own)],
        [int32(np.arange(shared)), int32(np.arange(shared, pages))],
        [int32([PAGE]), int32([PAGE] * batch)],
        qo_heads,
        kv_heads,
        dim,
        PAGE,
    )
    return lambda: wrapper.run(q, cache, pool=pool)


def blocks(request: dict[str, Any], pool: _core.ThreadPool) -> Callable[[], Any]:
    """Queries and keys of one sequence; each block of queries visits `share` of those of keys."""
    length, share = request["length"], request["share"]
    qo_heads, kv_heads, dim = heads(request)
    q = numbers(request, length, qo_heads, dim)
    k = numbers(request, length, kv_heads, dim)
    v = numbers(request, length, kv_heads, dim)
    if share is None:
        dense = ops.BatchPrefillWithRaggedKVCacheWrapper(None)
        dense.plan(int32([0, length]), int32([0, length]), qo_heads, kv_heads, dim)
        return lambda: dense.run(q, k, v, pool=pool)
    count = length // BLOCK
    visited = round(count * share)
    rng = np.random.default_rng(2)
    columns = [np.sort(rng.permutation(count)[:visited]) for _ in range(count)]
    sparse = ops.BlockSparseAttentionWrapper(None)
    sparse.plan(
        int32(np.arange(count + 1) * visited),
        int32(np.concatenate(columns)),
        length,
        length,
        BLOCK,
        BLOCK,
        qo_heads,
        kv_heads,
        dim,
    )
    return lambda: sparse.run(q, k, v, pool=pool)


CASES = {"prefill": paged, "decode": paged, "cascade": cascade, "blocks": blocks}

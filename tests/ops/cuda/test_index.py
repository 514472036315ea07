"""Lists of keys chosen on a GPU: those that the CPU chooses, and attention over them."""

import numpy as np
import pytest

from effinfer import InvalidArgumentError, UnsupportedError, ops
from tests.ops.batches import Paged, Shape, as_dtype, offsets, values_of
from tests.ops.cuda.gpu_arrays import here, there

ROWS, KEYS = [30, 0, 150, 1], [41, 5, 310, 70]


def make(dtype, heads=(4, 2, 32), kv_dtype=None):
    rng = np.random.default_rng(heads[2])
    q = as_dtype(2 * rng.standard_normal((sum(ROWS), heads[0], heads[2]), np.float32), dtype)
    k, v = (
        as_dtype(rng.standard_normal((sum(KEYS), *heads[1:]), np.float32), kv_dtype or dtype)
        for _ in range(2)
    )
    return q, k, v, {"qo_indptr": offsets(ROWS), "kv_indptr": offsets(KEYS)}


def same(got, want):
    for name in ("lists", "indptr", "spans", "qo_indptr", "kv_len"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    assert (got.num_kv_heads, got.block_size) == (want.num_kv_heads, want.block_size)


def attends(index, q, k, v, dtype):
    plan = index.plan(q.shape[2])
    expected = np.zeros_like(q)
    plan.run(q, k, v, expected)
    out = there(np.zeros_like(q))
    plan.run(there(q), there(k), there(v), out)
    got = values_of(here(out).view(expected.dtype), dtype)
    np.testing.assert_allclose(got, values_of(expected, dtype), atol=0.03)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_columns_and_slashes(dtype):
    q, k, v, lists = make(dtype)
    options = {"vertical_size": 9, "slash_size": 7, "last_q": 20, "sink_tokens": 2}
    options |= {"local_tokens": 5, "block_size": 16, **lists}
    index = ops.vertical_slash_index(there(q), there(k), **options)
    same(index, ops.vertical_slash_index(q, k, **options))
    assert index.density < 0.7
    attends(index, q, k, v, dtype)
    # Rows of one sequence follow each other.
    one = {**options, "qo_indptr": None, "kv_indptr": None}
    same(
        ops.vertical_slash_index(there(q[:30]), there(k[:41]), **one),
        ops.vertical_slash_index(q[:30], k[:41], **one),
    )


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("bfloat16", None), ("float32", None), ("float16", "int8")]
)
@pytest.mark.parametrize("strided", [False, True])
def test_sampled_columns(dtype, kv_dtype, strided):
    q, k, _, lists = make(dtype, kv_dtype=kv_dtype)
    options = {"sample_ratio": 0.3, "mass": 0.6, "local_tokens": 5, "block_size": 16, **lists}
    if kv_dtype == "int8":
        options["sm_scale"] = 32**-0.5 / 32
    want = ops.sampled_index(q, k, **options)
    queries = there(q)
    if strided:  # as a part of a fused product
        queries = there(np.concatenate([q, q[:, :3]], axis=1).view(q.dtype))[:, :4]
    same(ops.sampled_index(queries, there(k), **options), want)
    assert want.density < 0.9


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("method", ["mean", "antidiagonal"])
@pytest.mark.parametrize("top", [{"num_blocks": 2}, {"mass": 0.5}])
def test_blocks(dtype, method, top):
    q, k, v, lists = make(dtype)
    options = {"method": method, "stride": 4, "block_size": 16, **top, **lists}
    index = ops.block_score_index(there(q), there(k), **options)
    same(index, ops.block_score_index(q, k, **options))
    attends(index, q, k, v, dtype)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_paged_keys(layout, dtype):
    batch = Paged(np.random.default_rng(3), [40, 0, 90], 16, Shape(4, 2, 64), dtype, layout)
    rows = [9, 0, 20]
    q = batch.queries(rows, dtype)
    lists = {"qo_indptr": offsets(rows), "kv_indptr": batch.kv_indptr, "kv_len": batch.kv_len}
    lists |= {"kv_indices": batch.kv_indices, "kv_layout": layout, "block_size": 8}
    for call, options in (
        (ops.vertical_slash_index, {"vertical_size": 5, "slash_size": 4, "local_tokens": 3}),
        (ops.block_score_index, {"num_blocks": 2, "method": "antidiagonal", "stride": 2}),
    ):
        want = call(q, batch.cache[0], **options, **lists)
        same(call(there(q), there(batch.cache[0]), **options, **lists), want)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_pages(layout, dtype):
    batch = Paged(np.random.default_rng(4), [40, 0, 90, 200], 16, Shape(6, 2, 64), dtype, layout)
    rows = [1, 0, 0, 3]
    q = batch.queries(rows, dtype)
    lists = {"kv_indptr": batch.kv_indptr, "kv_indices": batch.kv_indices}
    lists["kv_len"] = batch.kv_len
    keys = {**lists, "kv_layout": layout}
    want = ops.page_bounds(batch.cache[0], **keys)
    bounds = ops.page_bounds(there(batch.cache[0]), **keys)
    assert bounds.device == "cuda:0"
    np.testing.assert_array_equal(here(bounds), want)
    options = {"num_pages": 2, "page_size": 16, "qo_indptr": offsets(rows), **lists}
    same(ops.topk_pages(there(q), bounds, **options), ops.topk_pages(q, want, **options))
    scores = np.random.default_rng(5).standard_normal((6, 22), np.float32)
    given = {"num_pages": 3, "page_size": 16, "num_kv_heads": 2, "kv_len": batch.kv_len}
    given |= {"qo_indptr": offsets(rows)}
    want = ops.topk_pages(q, scores=scores, **given)
    same(ops.topk_pages(there(q), scores=there(scores), **given), want)


def test_pages_of_ragged_keys():
    _, k, _, _ = make("bfloat16")
    for layout in ("NHD", "HND"):
        keys = k if layout == "NHD" else np.ascontiguousarray(k.swapaxes(0, 1))
        options = {"kv_indptr": offsets(KEYS), "page_size": 8, "kv_layout": layout}
        got = ops.page_bounds(there(keys), **options)
        np.testing.assert_array_equal(here(got), ops.page_bounds(keys, **options))


def test_what_is_refused():
    q, k, _, lists = make("bfloat16")
    pages = {"num_pages": 1, "page_size": 8, "kv_len": np.array([8], np.int32)}
    on_cpu = "expected a tensor on cuda:0, got one on cpu"
    for call, error, message in (
        (lambda: ops.vertical_slash_index(there(q), k, **lists), InvalidArgumentError,
         "k: " + on_cpu),
        (lambda: ops.block_score_index(there(q), k, num_blocks=1, **lists), InvalidArgumentError,
         r"\[block_score_index\] k: " + on_cpu),
        (lambda: ops.block_score_index(q, there(k), num_blocks=1, **lists), UnsupportedError,
         "on cuda:0"),
        (lambda: ops.topk_pages(there(q[:1]), np.zeros((2, 1, 2, 32), np.float32), **pages),
         InvalidArgumentError, r"\[topk_pages\] bounds: " + on_cpu),
        (lambda: ops.sampled_index(there(q), there(k), pool=ops.ThreadPool(1), **lists),
         InvalidArgumentError, "got a ThreadPool"),
        (lambda: ops.page_bounds(there(k)), InvalidArgumentError, "page_size: expected a number"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()

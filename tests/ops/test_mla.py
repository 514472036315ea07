"""Latent attention against float64."""

import numpy as np
import pytest

from effinfer import InvalidArgumentError, UnsupportedError, ops
from tests.ops.batches import Paged, Shape, as_dtype, offsets, values_of
from tests.ops.reference import assert_attention, attend, join, seen
from tests.ops.test_decode import bf16_products

KV_LENS = [1, 0, 20, 300]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "ckv", "kpe"), [(16, 512, 64), (3, 64, 16)])
def test_latent_attention(isa, dtype, causal, heads, ckv, kpe):
    rng = np.random.default_rng(ckv)
    rows = [1, 2, 5, 3] if causal else [1, 1, 1, 1]
    latent = Paged(rng, KV_LENS, 16, Shape(1, 1, ckv, kpe), dtype)
    caches = [x[:, :, 0] for x in latent.cache]
    q_nope, q_pe = (
        as_dtype(rng.standard_normal((sum(rows), heads, dim), np.float32), dtype)
        for dim in (ckv, kpe)
    )
    starts = offsets(rows)
    wrapper = ops.BatchMLAPagedAttentionWrapper(None)
    scale = 1 / np.sqrt(128 + 64)
    lists = starts, latent.kv_indptr, latent.kv_indices, latent.kv_len
    wrapper.plan(*lists, heads, ckv, kpe, 16, causal=causal, sm_scale=scale)
    out, lse = wrapper.run(q_nope, q_pe, *caches, return_lse=True)
    assert out.dtype == q_nope.dtype
    queries = np.concatenate([values_of(x, dtype) for x in (q_nope, q_pe)], axis=-1)
    parts = []
    for s, length in enumerate(KV_LENS):
        keys = np.concatenate([latent.keys[s], latent.values[s]], axis=-1)
        mask = seen(rows[s], length, causal)
        q = queries[starts[s] : starts[s + 1]]
        parts.append(attend(q, keys, latent.keys[s], mask, sm_scale=scale))
    products = bf16_products(dtype, dtype)
    options = {"dtype": dtype, "bf16_products": products}
    assert_attention(values_of(out, dtype), lse, join(parts), **options)


@pytest.mark.parametrize("q_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2", "float16"])
@pytest.mark.parametrize("packed", [False, True])
def test_scales_and_sinks(isa, q_dtype, kv_dtype, packed):
    """8-bit pages with a scale for either part, queries and pages in one array or in two."""
    rng = np.random.default_rng(5)
    rows, heads, ckv, kpe = [1, 0, 7, 2], 4, 128, 32
    latent = Paged(rng, KV_LENS, 16, Shape(1, 1, ckv, kpe), kv_dtype)
    caches = [x[:, :, 0] for x in latent.cache]
    shape = (sum(rows), heads, ckv + kpe)
    q = as_dtype(rng.standard_normal(shape, np.float32), q_dtype)
    starts, sinks = offsets(rows), rng.standard_normal(heads).astype(np.float32)
    wrapper = ops.BatchMLAPagedAttentionWrapper(None)
    lists = starts, latent.kv_indptr, latent.kv_indices, latent.kv_len
    wrapper.plan(*lists, heads, ckv, kpe, 16, True, 0.1, lse_mode="basee")
    scales = {"ckv_scale": 0.75, "kpe_scale": 1.25}
    if packed:
        both = np.concatenate(caches, axis=-1).view(caches[0].dtype)
        given = {"query": q, "kv_cache": both}
    else:
        given = {"query": (q[..., :ckv], q[..., ckv:]), "kv_cache": tuple(caches)}
    out, lse = wrapper.run_return_lse(**given, **scales, sinks=sinks)
    assert out.dtype == q.dtype
    parts, exact = [], values_of(q, q_dtype)
    for s, length in enumerate(KV_LENS):
        nope, rope = latent.keys[s] * 0.75, latent.values[s] * 1.25
        keys = np.concatenate([nope, rope], axis=-1)
        mask = seen(rows[s], length, True)
        queries = exact[starts[s] : starts[s + 1]]
        parts.append(attend(queries, keys, nope, mask, sm_scale=0.1, sinks=sinks))
    products = bf16_products(q_dtype, "bfloat16") and q_dtype == "bfloat16"
    options = {"dtype": q_dtype, "bf16_products": products, "lse_base": "ln"}
    assert_attention(values_of(out, q_dtype), lse, join(parts), **options)


def i32(*values):
    return np.array(values, np.int32)


PLAN = {
    "qo_indptr": i32(0, 1, 2),
    "kv_indptr": i32(0, 1, 3),
    "kv_indices": i32(0, 1, 2),
    "kv_len_arr": i32(4, 5),
    "num_heads": 2,
    "head_dim_ckv": 64,
    "head_dim_kpe": 16,
    "page_size": 4,
    "sm_scale": 1.0,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_len_arr": i32(4, 9)}, "kv_len_arr: expected 2 lengths, 0 to the pages' tokens"),
        ({"kv_len_arr": i32(4, -1)}, "kv_len_arr: expected"),
        ({"kv_len_arr": i32(4)}, "kv_len_arr: expected"),
        ({"qo_indptr": i32(0, 2)}, "qo_indptr: expected 3 values"),
        ({"kv_indptr": i32(0, 1, 4)}, "kv_indptr: expected at most 3|kv_len_arr"),
        ({"page_size": 0}, "page_size: expected a positive number"),
        ({"sm_scale": None}, "sm_scale: expected a number, got None"),
        ({"lse_mode": "base10"}, "lse_mode: expected none or base2 or basee"),
        ({"q_data_type": "float16", "output_dtype": "float32"}, "o_data_type: expected float16"),
        ({"sm_scale": float("inf")}, "sm_scale: expected a finite number"),
    ],
)
def test_errors_of_plans(changes, message):
    with pytest.raises(InvalidArgumentError, match=r"^\[batch_mla_paged_attention\] " + message):
        ops.BatchMLAPagedAttentionWrapper().plan(**(PLAN | changes))


def test_errors_of_runs():
    wrapper = ops.BatchMLAPagedAttentionWrapper()
    arrays = {
        "q_nope": np.zeros((2, 2, 64), np.float32),
        "q_pe": np.zeros((2, 2, 16), np.float32),
        "ckv_cache": np.zeros((3, 4, 64), np.float32),
        "kpe_cache": np.zeros((3, 4, 16), np.float32),
    }
    with pytest.raises(InvalidArgumentError, match=r"expected plan\(\) before run\(\)"):
        wrapper.run(**arrays)
    wrapper.plan(**PLAN)
    for name, array in arrays.items():
        for wrong in (array[:, :1], array[..., :8], array[0]):
            with pytest.raises(InvalidArgumentError, match=r"^\[.*\] \w+: expected"):
                wrapper.run(**(arrays | {name: wrong}))


def test_refused_by_name():
    wrapper = ops.BatchMLAPagedAttentionWrapper()
    for name in ("skip_softmax", "cum_seq_lens_q", "block_tables", "seq_lens", "metadata"):
        with pytest.raises(UnsupportedError, match=rf"{name}: expected None \("):
            wrapper.plan(**PLAN, **{name: True})
    with pytest.raises(UnsupportedError, match="max_q_len: expected None"):
        wrapper.plan(max_q_len=3)
    with pytest.raises(InvalidArgumentError, match="qo_indptr: expected an array, got None"):
        wrapper.plan(sm_scale=1.0)
    for name in ("query_layout", "kv_cache_layout", "output_scale", "scale_mode"):
        with pytest.raises(InvalidArgumentError, match=f"{name}: expected .*, got bmm-scalar"):
            wrapper.plan(**PLAN, **{name: "bmm-scalar"})
    wrapper.plan(**PLAN, use_sinks=True, scale_mode="kv-per-tensor", query_layout="packed")
    with pytest.raises(InvalidArgumentError, match="sinks: expected an array, as the plan has"):
        wrapper.run(query=np.zeros((2, 2, 80), np.float32), kv_cache=np.zeros((3, 4, 80), "f4"))
    wrapper.plan(**PLAN)
    q = np.zeros((2, 2, 80), np.float32)
    pages = np.zeros((3, 4, 80), np.float32)
    for name in (
        "profiler_buffer",
        "kv_len",
        "page_table",
        "o_scale",
        "ckv_scale_arr",
        "bmm1_scale",
        "bmm2_scale",
        "skip_softmax_threshold_scale_factor",
    ):
        with pytest.raises(UnsupportedError, match=rf"^\[.*\] {name}: expected None \("):
            wrapper.run(query=q, kv_cache=pages, **{name: np.ones(3)})
    for name in ("ckv_scale", "kpe_scale"):
        with pytest.raises(InvalidArgumentError, match=f"{name}: expected a positive number"):
            wrapper.run(query=q, kv_cache=pages, **{name: -1.0})
    for arrays, message in (
        ({"kv_cache": pages}, "query: expected an array or both of its parts"),
        ({"query": q, "q_pe": q[..., 64:], "kv_cache": pages}, "query: expected None beside"),
        ({"query": q, "kv_cache": (pages,)}, "kv_cache: expected two parts, got 1"),
        ({"query": q, "kv_cache": pages, "sinks": np.zeros(3)}, "sinks: expected float32"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            wrapper.run(**arrays)
    ok = wrapper.run(query=q, kv_cache=pages, return_lse=True, return_lse_base_on_e=True)
    np.testing.assert_allclose(ok[1], np.log([[4, 4], [5, 5]]), rtol=1e-6)

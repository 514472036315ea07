"""Latent attention on a GPU against float64."""

import numpy as np
import pytest

from effinfer import InvalidArgumentError, Queue, ops
from tests.ops.batches import Paged, Shape, as_dtype, offsets, values_of
from tests.ops.cuda.gpu_arrays import stream, there
from tests.ops.reference import assert_attention, attend, join, seen


def latent(rng, lengths, rows, heads, ckv, kpe, dtype, page_size=16, kv_dtype=None):
    batch = Paged(rng, lengths, page_size, Shape(1, 1, ckv, kpe), kv_dtype or dtype)
    parts = [
        as_dtype(rng.standard_normal((sum(rows), heads, dim), np.float32), dtype)
        for dim in (ckv, kpe)
    ]
    return batch, parts, [x[:, :, 0] for x in batch.cache]


def planned(batch, rows, heads, dims, page_size=16, **options):
    wrapper = ops.BatchMLAPagedAttentionWrapper()
    lists = offsets(rows), batch.kv_indptr, batch.kv_indices, batch.kv_len
    wrapper.plan(*lists, heads, *dims, page_size, **({"sm_scale": 0.07} | options))
    return wrapper


def expected(batch, parts, rows, dtype, causal=False, sinks=None):
    starts = offsets(rows)
    queries = np.concatenate([values_of(x, dtype) for x in parts], axis=-1)
    states = []
    for s, length in enumerate(batch.kv_lens):
        keys = np.concatenate([batch.keys[s], batch.values[s]], axis=-1)
        q, mask = queries[starts[s] : starts[s + 1]], seen(rows[s], length, causal)
        states.append(attend(q, keys, batch.keys[s], mask, sm_scale=0.07, sinks=sinks))
    return join(states)


@pytest.mark.parametrize(
    ("dtype", "heads", "dims", "lengths", "rows", "page_size"),
    [
        ("bfloat16", 16, (512, 64), [1, 0, 70, 300], [1, 1, 1, 1], 16),
        ("float16", 40, (512, 64), [45, 200], [1, 2], 64),
        ("bfloat16", 3, (64, 16), [1, 0, 20, 300], [1, 2, 5, 14], 5),
        ("float16", 2, (144, 24), [33, 9], [20, 3], 1),
        ("float32", 17, (512, 64), [45, 300], [1, 2], 16),
        ("float32", 3, (64, 16), [1, 0, 20, 300], [1, 2, 5, 14], 5),
        ("bfloat16", 2, (528, 72), [33, 9], [20, 3], 16),
    ],
)
def test_latent_attention(dtype, heads, dims, lengths, rows, page_size):
    causal = max(rows) > 1
    rng = np.random.default_rng(heads)
    batch, parts, caches = latent(rng, lengths, rows, heads, *dims, dtype, page_size)
    wrapper = planned(batch, rows, heads, dims, page_size, causal=causal)
    sinks = rng.standard_normal(heads).astype(np.float32) if causal else None
    given = None if sinks is None else there(sinks)
    arrays = [there(x) for x in (*parts, *caches)]
    out, lse = wrapper.run(*arrays, return_lse=True, sinks=given)
    assert out.device == "cuda:0"
    states = expected(batch, parts, rows, dtype, causal, sinks)
    options = {"dtype": dtype, "bf16_products": dtype != "float32"}
    assert_attention(values_of(out.to_numpy(), dtype), lse.to_numpy(), states, **options)
    # A part of its sequences alone, in another stream, has the same bits.
    alone = planned(batch, rows, heads, dims, page_size, causal=causal)
    again = alone.run(*arrays, sinks=given, pool=Queue("cuda:0", stream(24)))
    np.testing.assert_array_equal(again.to_numpy(), out.to_numpy())


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        *((d, f) for d in ("bfloat16", "float16") for f in ("float8_e4m3fn", "float8_e5m2")),
        ("float32", "float8_e4m3fn"),
        ("float32", "bfloat16"),
        ("bfloat16", "float16"),
    ],
)
def test_pages_of_another_type(dtype, kv_dtype):
    rng, dims, rows = np.random.default_rng(8), (512, 64), [1, 2]
    batch, parts, caches = latent(rng, [70, 300], rows, 3, *dims, dtype, 16, kv_dtype)
    wrapper = planned(batch, rows, 3, dims, causal=True)
    arrays = [there(x) for x in (*parts, *caches)]
    out, lse = wrapper.run(*arrays, return_lse=True)
    states = expected(batch, parts, rows, dtype, causal=True)
    options = {"dtype": dtype, "bf16_products": dtype != "float32"}
    assert_attention(values_of(out.to_numpy(), dtype), lse.to_numpy(), states, **options)


@pytest.mark.parametrize(
    ("dtype", "dims"), [("bfloat16", (64, 16)), ("float32", (64, 16)), ("float32", (272, 16))]
)
def test_long_sequences_are_shared_by_blocks_and_bits_do_not_change(dtype, dims):
    heads = 20 if dtype == "float32" else 4
    rng = np.random.default_rng(4)
    batch, parts, caches = latent(rng, [1100, 40], [1, 1], heads, *dims, dtype)
    q, pages = [there(x) for x in parts], [there(x) for x in caches]
    out = planned(batch, [1, 1], heads, dims).run(*q, *pages)
    assert_attention(
        values_of(out.to_numpy(), dtype), None, expected(batch, parts, [1, 1], dtype),
        dtype=dtype, bf16_products=dtype != "float32",
    )  # fmt: skip
    for s in range(2):
        alone = ops.BatchMLAPagedAttentionWrapper()
        listed = batch.kv_indices[batch.kv_indptr[s] : batch.kv_indptr[s + 1]]
        lists = offsets([1]), offsets([len(listed)]), listed, batch.kv_len[s : s + 1]
        alone.plan(*lists, heads, *dims, 16, sm_scale=0.07)
        one = alone.run(q[0][s : s + 1], q[1][s : s + 1], *pages)
        np.testing.assert_array_equal(one.to_numpy(), out.to_numpy()[s : s + 1])


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_scales_of_both_parts(kv_dtype):
    rng, dims, rows = np.random.default_rng(9), (64, 16), [1, 2]
    batch, parts, caches = latent(rng, [70, 300], rows, 3, *dims, "bfloat16", 16, kv_dtype)
    wrapper = planned(batch, rows, 3, dims, causal=True)
    scales = {"ckv_scale": 0.5, "kpe_scale": 1.5}
    out = wrapper.run(*(there(x) for x in (*parts, *caches)), **scales)
    for s in range(2):
        batch.keys[s], batch.values[s] = batch.keys[s] * 0.5, batch.values[s] * 1.5
    states = expected(batch, parts, rows, "bfloat16", causal=True)
    assert_attention(values_of(out.to_numpy(), "bfloat16"), None, states, dtype="bfloat16")


def test_queries_and_pages_in_one_array_and_buffers_of_fixed_sizes():
    dtype, dims, heads, rows = "bfloat16", (64, 16), 4, [1, 1]
    buffers = [there(np.full(n, 77, np.int32)) for n in (3, 3, 40, 2)]
    fixed = ops.BatchMLAPagedAttentionWrapper(None, True, *buffers)
    for seed, lengths in enumerate(([20, 90], [5, 300])):
        rng = np.random.default_rng(seed)
        batch, parts, caches = latent(rng, lengths, rows, heads, *dims, dtype)
        out = planned(batch, rows, heads, dims).run(*(there(x) for x in (*parts, *caches)))
        lists = offsets(rows), batch.kv_indptr, batch.kv_indices, batch.kv_len
        fixed.plan(*lists, heads, *dims, 16, sm_scale=0.07)
        q, pages = (there(np.concatenate(x, axis=-1).view(x[0].dtype)) for x in (parts, caches))
        whole = fixed.run(query=q, kv_cache=pages)
        np.testing.assert_array_equal(whole.to_numpy(), out.to_numpy())


def test_what_is_refused():
    dtype, dims, heads, rows = "bfloat16", (64, 16), 2, [1]
    batch, parts, caches = latent(np.random.default_rng(6), [5], rows, heads, *dims, dtype)
    wrapper = planned(batch, rows, heads, dims)
    q, pages = [there(x) for x in parts], [there(x) for x in caches]
    for call, error, message in (
        (lambda: wrapper.run(*q, pages[0], caches[1]), InvalidArgumentError,
         r"k_rope: expected a tensor on cuda:0, got one on cpu"),
        (lambda: wrapper.run(*q, caches[0], pages[1]), InvalidArgumentError,
         r"k: expected a tensor on cuda:0, got one on cpu"),
    ):  # fmt: skip
        with pytest.raises(error, match=r"(.|\n)*" + message):
            call()

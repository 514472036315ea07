"""Attention over NHD and HND caches on a GPU against float64."""

import ml_dtypes
import numpy as np
import pytest

from effinfer import InvalidArgumentError, Queue, UnsupportedError, _core, ops
from tests.ops.batches import Paged, Shape, offsets, values_of
from tests.ops.cuda.gpu_arrays import stream, there
from tests.ops.reference import assert_attention

LENGTHS = [1, 0, 17, 70]
TYPES = ["float16", "bfloat16"]
FLOATS = [*TYPES, "float32"]
NARROW = ["float8_e4m3fn", "float8_e5m2", "int8"]


def i32(*values):
    return np.array(values, np.int32)


def device_cache(batch):
    return there(batch.cache) if batch.one_array else tuple(there(x) for x in batch.cache)


def check(out, lse, expected, dtype, lse_base="log2"):
    assert out.device == "cuda:0"
    # Probabilities are rounded to the dtype of the values, but in float32.
    assert_attention(
        values_of(out.to_numpy(), dtype),
        lse.to_numpy(),
        expected,
        dtype=dtype,
        lse_base=lse_base,
        bf16_products=dtype != "float32",
    )


def decode(batch, dtype, *, plan=None, run=None, on_device=False, **options):
    shape = batch.shape
    rows = [1] * len(batch.kv_lens)
    q = batch.queries(rows, dtype)
    wrapper = ops.BatchDecodeWithPagedKVCacheWrapper(None, batch.layout)
    heads = (shape.num_qo_heads, shape.num_kv_heads, shape.head_dim)
    lists = [there(x) for x in batch.lists] if on_device else batch.lists
    given = {"logits_soft_cap" if k == "soft_cap" else k: v for k, v in options.items()}
    wrapper.plan(*lists, *heads, batch.page_size, **given, **(plan or {}))
    run = run or {}
    placed = {k: there(v) if isinstance(v, np.ndarray) else v for k, v in run.items()}
    out, lse = wrapper.run(there(q), device_cache(batch), return_lse=True, **placed)
    expected = batch.expected(
        q,
        rows,
        dtype,
        **options,
        k_scale=run.get("k_scale", 1.0) * run.get("q_scale", 1.0),
        v_scale=run.get("v_scale", 1.0),
        sinks=run.get("sinks"),
        alibi=(plan or {}).get("pos_encoding_mode") == "ALIBI",
    )
    check(out, lse, expected, dtype, run.get("lse_base", "log2"))
    return wrapper, q, out, lse


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", FLOATS)
def test_pages(layout, page_size, dtype):
    rng = np.random.default_rng(page_size)
    batch = Paged(rng, LENGTHS, page_size, Shape(6, 3, 64), dtype, layout, layout == "HND")
    decode(batch, dtype, on_device=page_size == 16)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("head_dim", [8, 72, 128, 256, 520])
@pytest.mark.parametrize("group", [1, 8, 20])
def test_head_dims_and_groups(head_dim, group, dtype):
    rng = np.random.default_rng(head_dim)
    batch = Paged(rng, [33, 130], 16, Shape(group, 1, head_dim), dtype)
    decode(batch, dtype)


@pytest.mark.parametrize(
    ("plan", "run", "options"),
    [
        ({}, {}, {"window_left": 10}),
        ({}, {}, {"soft_cap": 5.0}),
        ({"pos_encoding_mode": "ALIBI"}, {}, {}),
        ({}, {"lse_base": "ln"}, {}),
        ({}, {"q_scale": 0.5, "k_scale": 1.5, "v_scale": 0.25}, {}),
        ({}, {"sinks": np.array([0.5, -1, 3, 0, 8, 1], np.float32)}, {}),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_options(plan, run, options, dtype):
    batch = Paged(np.random.default_rng(3), LENGTHS, 8, Shape(6, 2, 64), dtype)
    decode(batch, dtype, plan=plan, run=run, **options)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize(("head_dim", "layout"), [(64, "NHD"), (128, "HND"), (208, "NHD")])
def test_caches_of_8_bits(narrow, dtype, head_dim, layout):
    rng = np.random.default_rng(head_dim)
    batch = Paged(rng, LENGTHS, 16, Shape(4, 2, head_dim), narrow, layout, layout == "HND")
    scale = 1 / 32 if narrow == "int8" else 0.5
    decode(batch, dtype, run={"k_scale": scale, "v_scale": scale, "q_scale": 1.5})


@pytest.mark.parametrize(
    ("q_dtype", "kv_dtype"), [(q, k) for q in FLOATS for k in FLOATS if q != k]
)
def test_caches_of_another_type(q_dtype, kv_dtype):
    batch = Paged(np.random.default_rng(13), LENGTHS, 16, Shape(6, 2, 72), kv_dtype)
    decode(batch, q_dtype, window_left=40)


@pytest.mark.parametrize("narrow", NARROW)
def test_prompts_over_caches_of_8_bits(narrow):
    batch = Paged(np.random.default_rng(5), [19, 0, 75], 16, Shape(4, 2, 64), narrow)
    options = {"k_scale": 1 / 32, "v_scale": 1 / 32} if narrow == "int8" else {}
    rows = [19, 0, 9]
    q = batch.queries(rows, "bfloat16")
    wrapper = ops.BatchPrefillWithPagedKVCacheWrapper()
    wrapper.plan(offsets(rows), *batch.lists, 4, 2, 64, 16, causal=True)
    out, lse = wrapper.run(there(q), device_cache(batch), return_lse=True, **options)
    check(out, lse, batch.expected(q, rows, "bfloat16", causal=True, **options), "bfloat16")


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("narrow", "head_dim"), [("int8", 64), ("float8_e4m3fn", 208)])
def test_scales_of_each_token_and_head(layout, narrow, head_dim):
    rng = np.random.default_rng(12)
    batch = Paged(rng, LENGTHS, 16, Shape(4, 2, head_dim), narrow, layout)
    scales = rng.uniform(1 / 64, 1 / 16, (2, batch.num_pages, 16, 2)).astype(np.float32)
    for s in range(len(LENGTHS)):
        at = batch.places(s)
        batch.keys[s] = batch.keys[s] * scales[0][at][..., None]
        batch.values[s] = batch.values[s] * scales[1][at][..., None]
    if layout == "HND":
        scales = np.ascontiguousarray(scales.swapaxes(2, 3))
    cache = device_cache(batch)
    wrapper = ops.BatchDecodeWithPagedKVCacheWrapper(None, layout)
    wrapper.plan(*batch.lists, 4, 2, head_dim, 16)
    given = {"k_scale": there(scales[0]), "v_scale": there(scales[1])}
    for dtype in FLOATS:
        q = batch.queries([1] * 4, dtype)
        out, lse = wrapper.run(there(q), cache, return_lse=True, **given)
        check(out, lse, batch.expected(q, [1] * 4, dtype), dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_long_sequences_are_shared_by_blocks_and_bits_do_not_change(dtype):
    batch = Paged(np.random.default_rng(4), [2049, 40], 32, Shape(4, 1, 64), dtype)
    wrapper, q, out, lse = decode(batch, dtype)
    # The same plan again, in another stream, and each sequence by itself.
    queue = Queue("cuda:0", stream(21))
    again = wrapper.run(there(q), device_cache(batch), pool=queue)
    np.testing.assert_array_equal(again.to_numpy(), out.to_numpy())
    for s in range(2):
        alone = ops.BatchDecodeWithPagedKVCacheWrapper()
        pages = batch.kv_indices[batch.kv_indptr[s] : batch.kv_indptr[s + 1]]
        lists = np.array([0, len(pages)], np.int32), pages, batch.last_page_len[s : s + 1]
        alone.plan(*lists, 4, 1, 64, 32)
        one, sums = alone.run(there(q[s : s + 1]), device_cache(batch), return_lse=True)
        np.testing.assert_array_equal(one.to_numpy(), out.to_numpy()[s : s + 1])
        np.testing.assert_array_equal(sums.to_numpy(), lse.to_numpy()[s : s + 1])
    # Plans that go while their work has not run.
    pending = wrapper.run(there(q), device_cache(batch), pool=queue)
    del wrapper
    np.testing.assert_array_equal(pending.to_numpy(), out.to_numpy())


def prefill(batch, rows, dtype, *, masks=None, head_dim_vo=None, **options):
    shape = batch.shape
    q = batch.queries(rows, dtype)
    wrapper = ops.BatchPrefillWithPagedKVCacheWrapper(None, batch.layout)
    heads = (shape.num_qo_heads, shape.num_kv_heads, shape.head_dim, batch.page_size)
    if masks is not None:
        options["custom_mask"] = np.concatenate([mask.reshape(-1) for mask in masks])
    wrapper.plan(offsets(rows), *batch.lists, *heads, head_dim_vo, **options)
    out, lse = wrapper.run(there(q), device_cache(batch), return_lse=True)
    options.pop("custom_mask", None)
    check(out, lse, batch.expected(q, rows, dtype, masks=masks, **options), dtype)
    return q, out


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("window_left", [-1, 20])
@pytest.mark.parametrize("causal", [False, True])
def test_prefill(causal, window_left, dtype):
    batch = Paged(np.random.default_rng(5), [19, 0, 75, 6], 16, Shape(4, 2, 64), dtype, "HND")
    prefill(batch, [19, 0, 9, 1], dtype, causal=causal, window_left=window_left)


@pytest.mark.parametrize(("dtype", "dim"), [("bfloat16", 96), ("float32", 300)])
def test_prefill_with_other_dims_of_values(dtype, dim):
    batch = Paged(np.random.default_rng(6), [21, 70], 16, Shape(2, 1, dim, 64), dtype)
    prefill(batch, [3, 20], dtype, causal=True, head_dim_vo=64)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_prefill_with_masks(dtype):
    rng = np.random.default_rng(7)
    batch = Paged(rng, [21, 70], 16, Shape(2, 1, 64), dtype)
    rows = [3, 20]
    masks = [rng.random((n, m)) < 0.4 for n, m in zip(rows, batch.kv_lens, strict=True)]
    prefill(batch, rows, dtype, masks=masks)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_contiguous_keys(layout):
    dtype = "bfloat16"
    batch = Paged(np.random.default_rng(8), [50], 50, Shape(4, 2, 64), dtype, layout)
    page = batch.kv_indices[0]
    k, v = (there(x[page]) for x in batch.cache)
    q, out = prefill(batch, [7], dtype, causal=True)
    other = ops.single_prefill_with_kv_cache(there(q), k, v, causal=True, kv_layout=layout)
    np.testing.assert_array_equal(other.to_numpy(), out.to_numpy())
    one = ops.single_decode_with_kv_cache(there(q[6]), k, v, layout)
    np.testing.assert_array_equal(one.to_numpy(), out.to_numpy()[6])
    ragged = ops.BatchPrefillWithRaggedKVCacheWrapper(None, layout)
    ragged.plan(offsets([7]), offsets([50]), 4, 2, 64, causal=True)
    np.testing.assert_array_equal(ragged.run(there(q), k, v).to_numpy(), out.to_numpy())


def test_strided_queries_and_keys():
    rng = np.random.default_rng(9)
    qkv = rng.standard_normal((30, 4, 64), np.float32).astype(ml_dtypes.bfloat16)
    x = there(qkv)
    out = ops.single_prefill_with_kv_cache(x[:, :2], x[:, 2:3], x[:, 3:], causal=True)
    parts = [np.ascontiguousarray(part) for part in (qkv[:, :2], qkv[:, 2:3], qkv[:, 3:])]
    same = ops.single_prefill_with_kv_cache(*(there(part) for part in parts), causal=True)
    np.testing.assert_array_equal(out.to_numpy(), same.to_numpy())


def test_a_cascade_is_its_concatenated_keys():
    rng = np.random.default_rng(10)
    cache = rng.standard_normal((5, 2, 16, 2, 64), np.float32).astype(ml_dtypes.bfloat16)
    q = rng.standard_normal((2, 4, 64), np.float32).astype(ml_dtypes.bfloat16)
    cascade = ops.MultiLevelCascadeAttentionWrapper(2)
    cascade.plan(
        [i32(0, 2), i32(0, 1, 2)],
        [i32(0, 3), i32(0, 1, 2)],
        [i32(0, 1, 2), i32(3, 4)],
        [i32(16), i32(3, 9)],
        4, 2, 64, 16,
    )  # fmt: skip
    expected = cascade.run(q, cache).astype(np.float32)
    actual = cascade.run(there(q), there(cache)).to_numpy().view(ml_dtypes.bfloat16)
    np.testing.assert_allclose(actual.astype(np.float32), expected, atol=0.02)


@pytest.mark.parametrize("name", ["decode", "prefill", "sinks"])
def test_wrappers_of_wrappers(name):
    rng = np.random.default_rng(13)
    cache = rng.standard_normal((6, 2, 16, 2, 64), np.float32).astype(ml_dtypes.bfloat16)
    q, k, v = (
        rng.standard_normal((n, h, 64), np.float32).astype(ml_dtypes.bfloat16)
        for n, h in ((2, 4), (30, 2), (30, 2))
    )
    logits = rng.standard_normal(4).astype(np.float32)
    lists = (i32(0, 2, 4), i32(0, 1, 2, 3), i32(3, 5), 4, 2, 64, 16)

    def run(placed):
        if name == "sinks":
            wrapper = ops.BatchAttentionWithAttentionSinkWrapper(None, "NHD")
            wrapper.plan(i32(0, 1, 2), *lists, causal=True)
            return wrapper.run(placed(q), placed(cache), placed(logits), 0.125)
        prefix = placed(q), placed(k), placed(v), placed(cache)
        if name == "decode":
            shared = ops.BatchDecodeWithSharedPrefixPagedKVCacheWrapper()
            shared.begin_forward(*lists)
            return shared.forward(*prefix)
        both = ops.BatchPrefillWithSharedPrefixPagedKVCacheWrapper()
        both.begin_forward(i32(0, 1, 2), *lists)
        return both.forward(*prefix, causal=True)

    actual = run(there).to_numpy().view(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_allclose(actual, run(lambda x: x).astype(np.float32), atol=0.02)


def test_nothing_to_do():
    batch = Paged(np.random.default_rng(11), [5], 16, Shape(2, 1, 64), "bfloat16")
    _, out = prefill(batch, [0], "bfloat16")
    assert out.shape == (0, 2, 64)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_buffers_of_fixed_sizes(dtype):
    """plan() fills them; what kernels read lies elsewhere, at addresses that stay: recordings of it
    are replayed in tests/gpu/test_operators.cpp."""
    heads = (4, 2, 64)
    buffers = [there(np.full(n, 77, np.int32)) for n in (4, 60, 3)]
    fixed = ops.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(None, *buffers)
    assert fixed.is_cuda_graph_enabled
    options = {"pos_encoding_mode": "ALIBI"}
    for seed, lengths in enumerate(([5, 16, 300], [80, 0, 1], [700, 1, 9])):
        batch = Paged(np.random.default_rng(seed), lengths, 16, Shape(*heads), dtype)
        q = there(batch.queries([1] * 3, dtype))
        plain = ops.BatchDecodeWithPagedKVCacheWrapper()
        for wrapper in (plain, fixed):
            wrapper.plan(*batch.lists, *heads, 16, **options)
        expected = plain.run(q, device_cache(batch)).to_numpy()
        for queue in (None, Queue("cuda:0", stream(22))):
            made = fixed.run(q, device_cache(batch), pool=queue)
            np.testing.assert_array_equal(made.to_numpy(), expected)
        for buffer, values in zip(buffers, batch.lists, strict=True):
            np.testing.assert_array_equal(buffer.to_numpy()[: values.size], values)
    # The buffers themselves may be the lists of a plan.
    ops.fast_decode_plan(fixed, *buffers, *heads, 16, **options)
    np.testing.assert_array_equal(fixed.run(q, device_cache(batch)).to_numpy(), expected)
    for change, message in (
        ({"sm_scale": 2.0, **options}, "plan: expected the scores of the first plan"),
        ({"window_left": 3, **options}, "geometry: expected that of the first plan"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            fixed.plan(*batch.lists, *heads, 16, **change)
    with pytest.raises(InvalidArgumentError, match="buffer: expected an array on cuda:0, got one"):
        mixed = (buffers[0], np.zeros(60, np.int32), buffers[2])
        ops.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(None, *mixed)


@pytest.mark.parametrize("masked", [False, True])
def test_prefill_with_buffers_of_fixed_sizes(masked):
    heads = (4, 2, 64)
    sizes = [4, 4, 40, 3]
    buffers = [there(np.full(n, 77, np.int32)) for n in sizes]
    masks = there(np.zeros(900, np.uint8)), there(np.zeros(4, np.int32))
    fixed = ops.BatchPrefillWithPagedKVCacheWrapper(
        None, "NHD", True, *buffers, *(masks if masked else ())
    )
    for seed, rows in enumerate(([3, 1, 7], [2, 2, 2])):
        rng = np.random.default_rng(seed)
        batch = Paged(rng, [20, 5, 300], 16, Shape(*heads), "float16")
        options = {"causal": True}
        if masked:
            each = [rng.random((n, m)) < 0.7 for n, m in zip(rows, batch.kv_lens, strict=True)]
            options = {"custom_mask": np.concatenate([x.reshape(-1) for x in each])}
        q = there(batch.queries(rows, "float16"))
        plain = ops.BatchPrefillWithPagedKVCacheWrapper()
        for wrapper in (plain, fixed):
            wrapper.plan(offsets(rows), *batch.lists, *heads, 16, **options)
        expected = plain.run(q, device_cache(batch)).to_numpy()
        np.testing.assert_array_equal(fixed.run(q, device_cache(batch)).to_numpy(), expected)


def small(dtype="bfloat16", head_dim=64, page_size=16):
    batch = Paged(np.random.default_rng(12), [5], page_size, Shape(2, 1, head_dim), dtype)
    wrapper = ops.BatchDecodeWithPagedKVCacheWrapper()
    wrapper.plan(*batch.lists, 2, 1, head_dim, page_size)
    return batch, wrapper


def test_what_is_refused():
    batch, wrapper = small()
    q, cache = there(batch.queries([1], "bfloat16")), device_cache(batch)
    run = wrapper.run
    on_cpu = r"expected a tensor on cuda:0, got one on cpu"
    for call, error, message in (
        (lambda: run(q, batch.cache), InvalidArgumentError, r"\] k: " + on_cpu),
        (lambda: run(q, (cache[0], batch.cache[1])), InvalidArgumentError, r"\] v: " + on_cpu),
        (lambda: run(q, cache, out=np.zeros((1, 2, 64), np.float16)), InvalidArgumentError, "out"),
        (lambda: run(batch.queries([1], "bfloat16"), cache), UnsupportedError, "got one on cuda:0"),
        (lambda: run(q, _core.PagedKv(4, 1, 64, "bf16")), InvalidArgumentError, "PagedKv"),
        (lambda: run(q, cache, sinks=np.zeros(2, np.float32)), InvalidArgumentError, on_cpu),
        (lambda: run(q, cache, pool=ops.ThreadPool(1)), InvalidArgumentError, "got a ThreadPool"),
        (lambda: run(q, cache, k_scale=np.ones((4, 16, 1), np.float32)), InvalidArgumentError,
         r"\] k_scale: " + on_cpu),
        (lambda: run(q, cache, v_scale=there(np.ones((4, 8, 1), np.float32))),
         InvalidArgumentError, r"\] v_scale: expected shape"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
    rotating = ops.BatchDecodeWithPagedKVCacheWrapper()
    rotating.plan(*batch.lists, 2, 1, 64, 16, pos_encoding_mode="ROPE_LLAMA")
    with pytest.raises(UnsupportedError, match="expected NONE or ALIBI on a GPU, got ROPE_LLAMA"):
        rotating.run(q, cache)
    shifted = there(np.zeros(64 * 3 + 1, ml_dtypes.bfloat16))[1:129].reshape(
        (
            1,
            2,
            64,
        )
    )
    with pytest.raises(
        InvalidArgumentError, match=r"\] q: expected rows that begin at multiples of"
    ):
        run(shifted, cache)

"""Decode attention of FlashInfer's names against float64."""

import numpy as np
import pytest
import torch

from effinfer import InvalidArgumentError, _core, ops
from tests.ops.batches import Paged, Shape, as_torch, values_of
from tests.ops.reference import assert_attention, attend, seen

LENGTHS = [1, 0, 17, 64, 301, 2049]


def bf16_products(q_dtype: str, kv_dtype: str) -> bool:
    """Whether the kernel of the current level may round probabilities to bfloat16."""
    level = _core.has_avx512_bf16() and _core.current_isa() in ("avx512", "amx")
    return level and kv_dtype == "bfloat16"


def check(batch, q_dtype="float32", *, plan=None, run=None, **options):
    """plan, run: more options of the calls; options: of both plan() and the reference."""
    shape = batch.shape
    rows = [1] * len(batch.kv_lens)
    q = batch.queries(rows, q_dtype)
    wrapper = ops.BatchDecodeWithPagedKVCacheWrapper(None, batch.layout)
    heads = (shape.num_qo_heads, shape.num_kv_heads, shape.head_dim)
    names = {"soft_cap": "logits_soft_cap"}
    given = {names.get(name, name): value for name, value in options.items()}
    wrapper.plan(*batch.lists, *heads, batch.page_size, **given, **(plan or {}))
    out, lse = wrapper.run(q, batch.cache, return_lse=True, **(run or {}))
    assert out.dtype == q.dtype
    plan, run = plan or {}, run or {}
    scales = {
        name: 1.0 if isinstance(value, np.ndarray) else value
        for name, value in run.items()
        if name.endswith("_scale")
    }
    expected = batch.expected(
        q,
        rows,
        q_dtype,
        **options,
        k_scale=scales.get("k_scale", 1.0) * scales.get("q_scale", 1.0),
        v_scale=scales.get("v_scale", 1.0),
        sinks=run.get("sinks"),
        alibi=plan.get("pos_encoding_mode") == "ALIBI",
        rope=(
            (plan.get("rope_theta", 1e4), plan.get("rope_scale", 1.0))
            if plan.get("pos_encoding_mode") == "ROPE_LLAMA"
            else None
        ),
    )
    assert_attention(
        values_of(out, q_dtype),
        lse,
        expected,
        dtype=q_dtype,
        lse_base=run.get("lse_base", "log2"),
        bf16_products=bf16_products(q_dtype, batch.kv_dtype),
    )
    return wrapper, q, out, lse


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_pages(isa, layout, page_size, dtype):
    rng = np.random.default_rng(page_size)
    shape = Shape(6, 3, 64)
    one = layout == "HND"
    check(Paged(rng, LENGTHS, page_size, shape, dtype, layout, one), dtype)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(1, 1, 128), (8, 1, 80), (5, 5, 96), (9, 3, 256), (2, 1, 72), (64, 8, 112)],
)
def test_heads(isa, heads, kv_heads, head_dim):
    rng = np.random.default_rng(head_dim)
    check(Paged(rng, [5, 130], 7, Shape(heads, kv_heads, head_dim), "bfloat16"), "bfloat16")
    check(Paged(rng, [5, 130], 7, Shape(heads, kv_heads, head_dim)))


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "bfloat16"])
@pytest.mark.parametrize("q_dtype", ["float32", "float16", "bfloat16"])
def test_scaled_caches(isa, kv_dtype, q_dtype):
    rng = np.random.default_rng(2)
    batch = Paged(rng, LENGTHS, 16, Shape(4, 2, 64), kv_dtype)
    scales = {"k_scale": 1 / 32, "v_scale": 1 / 32} if kv_dtype == "int8" else {}
    check(batch, q_dtype, run=scales or {"k_scale": 0.5, "v_scale": 2.0, "q_scale": 1.5})


@pytest.mark.parametrize("q_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_scales_of_each_token_and_head(isa, layout, q_dtype):
    rng = np.random.default_rng(12)
    batch = Paged(rng, LENGTHS, 16, Shape(4, 2, 64), "int8", layout)
    scales = rng.uniform(1 / 64, 1 / 16, (2, batch.num_pages, 16, 2)).astype(np.float32)
    for s in range(len(LENGTHS)):
        at = batch.places(s)
        batch.keys[s] = batch.keys[s] * scales[0][at][..., None]
        batch.values[s] = batch.values[s] * scales[1][at][..., None]
    if layout == "HND":
        scales = np.ascontiguousarray(scales.swapaxes(2, 3))
    check(batch, q_dtype, run={"k_scale": scales[0], "v_scale": scales[1]})


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("base", ["log2", "ln"])
def test_sinks(isa, base, dtype):
    rng = np.random.default_rng(13)
    batch = Paged(rng, LENGTHS, 16, Shape(6, 2, 64), dtype)
    sinks = np.array([0.0, 2.5, -3.0, 40.0, -np.inf, -80.0], np.float32)
    check(batch, dtype, run={"sinks": sinks, "lse_base": base, "v_scale": 2.0})


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (np.zeros(4), "sinks: expected float32, got float64"),
        (np.zeros(3, np.float32), r"sinks: expected shape \(4,\)"),
        (np.zeros((4, 1), np.float32), r"sinks: expected shape \(4,\)"),
    ],
)
def test_wrong_sinks(sinks, message):
    batch = Paged(np.random.default_rng(14), [30, 5], 8)
    wrapper, q, _, _ = check(batch)
    with pytest.raises(InvalidArgumentError, match=OP + message):
        wrapper.run(q, batch.cache, sinks=sinks)


@pytest.mark.parametrize("window", [-1, 0, 15, 100])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_windows_and_caps(isa, window, soft_cap):
    batch = Paged(np.random.default_rng(3), LENGTHS, 16)
    check(batch, window_left=window, soft_cap=soft_cap, sm_scale=0.3)


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("base", ["log2", "ln"])
def test_alibi(isa, heads, base):
    batch = Paged(np.random.default_rng(4), LENGTHS, 16, Shape(heads, 2, 64))
    check(batch, plan={"pos_encoding_mode": "ALIBI"}, run={"lse_base": base})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_rotated(isa, dtype, layout):
    batch = Paged(np.random.default_rng(5), [1, 0, 40, 200], 16, kv_dtype=dtype, layout=layout)
    rope = {"pos_encoding_mode": "ROPE_LLAMA", "rope_theta": 5e5, "rope_scale": 2.0}
    check(batch, dtype, plan=rope)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("tokens", [0, 1, 999])
def test_single_decode(isa, layout, tokens):
    rng = np.random.default_rng(6)
    q = rng.standard_normal((6, 64), np.float32)
    k, v = rng.standard_normal((2, tokens, 2, 64), np.float32)
    given = [k, v] if layout == "NHD" else [x.swapaxes(0, 1).copy() for x in (k, v)]
    out, lse = ops.single_decode_with_kv_cache(
        q, *given, layout, window_left=300, return_lse=True, q_scale=2.0, v_scale=3.0
    )
    expected = attend(q[None] * 2.0, k, v * 3.0, seen(1, tokens, window_left=300))
    assert_attention(out[None], lse[None], expected)
    alone = ops.single_decode_with_kv_cache(q, *given, layout, "NONE")
    assert alone.shape == (6, 64)


def test_out_and_lse(isa):
    batch = Paged(np.random.default_rng(7), [30, 5], 8)
    wrapper, q, out, lse = check(batch)
    target, sums = np.empty_like(out), np.empty_like(lse)
    returned = wrapper.run(q, batch.cache, out=target, lse=sums, return_lse=True)
    assert returned[0] is target
    assert returned[1] is sums
    np.testing.assert_array_equal(target, out)
    np.testing.assert_array_equal(sums, lse)
    assert wrapper.run(q, batch.cache, out=target) is target


def test_the_kind_of_array_stays():
    batch = Paged(np.random.default_rng(8), [30, 5], 8, kv_dtype="bfloat16")
    wrapper, q, out, lse = check(batch, "bfloat16")
    cache = tuple(as_torch(x, "bfloat16") for x in batch.cache)
    got, sums = wrapper.run(as_torch(q, "bfloat16"), cache, return_lse=True)
    assert got.dtype == torch.bfloat16
    assert sums.dtype == torch.float32
    np.testing.assert_array_equal(got.view(torch.int16).numpy(), out.view(np.int16))
    np.testing.assert_array_equal(sums.numpy(), lse)


def test_strided_queries():
    batch = Paged(np.random.default_rng(9), [30, 5], 8)
    wrapper, q, out, _ = check(batch)
    padded = np.zeros((2, 4, 3, 64), np.float32)
    padded[:, :, 1] = q
    np.testing.assert_array_equal(wrapper.run(padded[:, :, 1], batch.cache), out)
    turned = np.ascontiguousarray(q.swapaxes(1, 2)).swapaxes(1, 2)
    np.testing.assert_array_equal(wrapper.run(turned, batch.cache), out)


def test_rows_do_not_depend_on_the_batch(isa):
    rng = np.random.default_rng(10)
    batch = Paged(rng, [70, 1, 1500, 300], 16)
    _, q, out, lse = check(batch)
    for s in range(4):
        wrapper = ops.BatchDecodeWithPagedKVCacheWrapper()
        pages = batch.kv_indices[batch.kv_indptr[s] : batch.kv_indptr[s + 1]]
        lists = np.array([0, len(pages)], np.int32), pages, batch.last_page_len[s : s + 1]
        for threads in (1, 3):
            pool = _core.ThreadPool(threads, oversubscribe=True)
            wrapper.plan(*lists, 4, 2, 64, 16)
            alone = wrapper.run(q[s : s + 1], batch.cache, return_lse=True, pool=pool)
            np.testing.assert_array_equal(alone[0][0], out[s])
            np.testing.assert_array_equal(alone[1][0], lse[s])


def i32(*values):
    return np.array(values, np.int32)


PLAN = {
    "indptr": i32(0, 1, 3),
    "indices": i32(0, 1, 2),
    "last_page_len": i32(4, 1),
    "num_qo_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "page_size": 4,
}
OP = r"^\[batch_decode_with_paged_kv_cache\] "


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indptr": i32(0, 2, 1)}, "indptr: expected values that never decrease"),
        ({"indptr": i32(1, 2, 3)}, "indptr: expected 0 first, got 1"),
        ({"indptr": i32(0, 1, 4)}, "indptr: expected at most 3"),
        ({"indptr": np.zeros(3)}, "indptr: expected int32 or int64, got float64"),
        ({"indptr": np.array([0, 1, 2**40])}, "indptr: expected values that fit int32"),
        ({"indptr": i32(0, 1, 3)[None]}, "indptr: expected 1 dimension"),
        ({"indptr": i32()}, "indptr: expected at least one value"),
        ({"indices": i32(0, -1, 2)}, "indices: expected no negative page"),
        ({"last_page_len": i32(4)}, "last_page_len: expected 2 values, got 1"),
        ({"last_page_len": i32(4, 0)}, r"last_page_len\[1\]: expected 1 to page_size = 4, got 0"),
        ({"last_page_len": i32(5, 1)}, r"last_page_len\[0\]: expected 1 to page_size = 4, got 5"),
        ({"page_size": 0}, "page_size: expected a positive number, got 0"),
        ({"num_qo_heads": 5}, "num_qo_heads: expected a multiple of 2"),
        ({"num_kv_heads": 0}, "num_kv_heads: expected a positive number, got 0"),
        ({"head_dim": -64}, "head_dim_qk: expected a positive number"),
        ({"pos_encoding_mode": "SINUS"}, "pos_encoding_mode: expected NONE or ROPE_LLAMA or ALIBI"),
        ({"sm_scale": float("nan")}, "sm_scale: expected a finite number"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap: expected a number >= 0"),
    ],
)
def test_errors_of_plans(changes, message):
    with pytest.raises(InvalidArgumentError, match=OP + message):
        ops.BatchDecodeWithPagedKVCacheWrapper().plan(**(PLAN | changes))


Q = np.zeros((2, 4, 64), np.float32)
CACHE = np.zeros((3, 2, 4, 2, 64), np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": Q[:1]}, r"q: expected shape \(2, 4, 64\) of the plan"),
        ({"q": Q[..., :32]}, "q: expected shape"),
        ({"q": Q.astype(np.float16)}, "q: expected float32, the plan's q_data_type"),
        ({"q": [1.0]}, "q: expected a numpy array, a torch tensor"),
        ({"paged_kv_cache": CACHE[0]}, r"paged_kv_cache: expected \(k, v\) or shape"),
        ({"paged_kv_cache": (CACHE[:, 0],)}, r"paged_kv_cache: expected \(k_cache, v_cache\)"),
        ({"paged_kv_cache": CACHE[:2]}, "k: expected shape .*more pages"),
        ({"paged_kv_cache": CACHE[:, :, :3]}, "k: expected"),
        ({"paged_kv_cache": CACHE[..., :1, :]}, "k: expected"),
        ({"paged_kv_cache": CACHE[..., :32]}, "k: expected"),
        ({"paged_kv_cache": CACHE.astype(np.int32)}, "k: expected"),
        ({"out": np.zeros((2, 4, 32), np.float32)}, "out: expected float32"),
        ({"out": np.zeros((2, 4, 64), np.float16)}, "out: expected float32"),
        ({"out": np.zeros((2, 64, 4), np.float32).swapaxes(1, 2)}, "out: expected a C-contiguous"),
        ({"lse": np.zeros((2, 4))}, "lse: expected float32"),
        ({"lse_base": "log10"}, "lse_base: expected log2 or ln, got log10"),
    ],
)
def test_errors_of_runs(changes, message):
    wrapper = ops.BatchDecodeWithPagedKVCacheWrapper()
    wrapper.plan(**PLAN, q_data_type=torch.float32)
    arguments = {"q": Q, "paged_kv_cache": CACHE, "return_lse": True} | changes
    with pytest.raises(InvalidArgumentError, match=r"^\[.*\] .*" + message):
        wrapper.run(**arguments)


def test_errors_before_plans():
    with pytest.raises(InvalidArgumentError, match=OP + r"run: expected plan\(\) before run\(\)"):
        ops.BatchDecodeWithPagedKVCacheWrapper().run(Q, CACHE)
    with pytest.raises(InvalidArgumentError, match=OP + "kv_layout: expected NHD or HND"):
        ops.BatchDecodeWithPagedKVCacheWrapper(None, "DHN")


def test_random_lists(isa):
    """Any lists: a typed error, or the attention that they describe."""
    rng = np.random.default_rng(11)
    worked = 0
    for _ in range(60):
        count = int(rng.integers(0, 4))
        pages = np.cumsum(rng.integers(0, 3, count + 1) - (rng.random() < 0.1)).astype(np.int32)
        pages -= pages[0]
        indices = rng.integers(-(rng.random() < 0.1), 5, 6).astype(np.int32)
        last = rng.integers(rng.random() < 0.8, 6, count).astype(np.int32)
        q = rng.standard_normal((count, 4, 16), np.float32)
        cache = rng.standard_normal((5, 2, 5, 2, 16), np.float32)
        wrapper = ops.BatchDecodeWithPagedKVCacheWrapper()
        try:
            wrapper.plan(pages, indices, last, 4, 2, 16, 5)
            out, lse = wrapper.run(q, cache, return_lse=True)
        except InvalidArgumentError:
            continue
        worked += 1
        for s in range(count):
            listed = indices[pages[s] : pages[s + 1]]
            tokens = cache[listed].swapaxes(1, 2).reshape(-1, 2, 2, 16)
            tokens = tokens[: max(len(tokens) - 5 + last[s], 0)] if len(listed) else tokens
            expected = attend(q[s : s + 1], tokens[:, 0], tokens[:, 1], seen(1, len(tokens)))
            assert_attention(out[s : s + 1], lse[s : s + 1], expected)
    assert worked > 10


def test_a_batch_of_nothing():
    cache = np.zeros((4, 2, 16, 2, 64), np.float32)
    none = np.zeros(0, np.int32)
    start = np.zeros(1, np.int32)
    decode = ops.BatchDecodeWithPagedKVCacheWrapper(None)
    decode.plan(start, none, none, 4, 2, 64, 16)
    out, lse = decode.run(np.zeros((0, 4, 64), np.float32), cache, return_lse=True)
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)
    prefill = ops.BatchPrefillWithRaggedKVCacheWrapper(None)
    prefill.plan(np.zeros(3, np.int32), np.zeros(3, np.int32), 4, 2, 64)
    empty = torch.zeros(0, 2, 64)
    assert prefill.run(torch.zeros(0, 4, 64), empty, empty).shape == (0, 4, 64)


def test_a_plan_names_its_kernel(isa):
    lists = (np.array([0, 1], np.int32), np.array([0, 3], np.int32), None, np.array([3], np.int32))
    sizes = {"page_size": 1, "num_qo_heads": 2, "num_kv_heads": 1}
    plan = _core.AttentionPlan(*lists, **sizes, head_dim_qk=16, head_dim_vo=16)
    level = "avx512" if isa == "amx" else isa
    assert plan.kernel("f32", "bf16") == f"attention.{level}"
    slow = "vectors multiply float32" in _core.describe_bf16()  # in pairs, on this CPU
    pairs = ".bf16" if bf16_products("bfloat16", "bfloat16") and not slow else ""
    assert plan.kernel("bf16", "f8_e4m3") == f"attention.{level}{pairs}"

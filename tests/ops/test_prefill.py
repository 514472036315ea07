"""Prefill attention of FlashInfer's names against float64."""

import numpy as np
import pytest
import torch

from effinfer import InvalidArgumentError, ops
from tests.ops.batches import Paged, Shape, as_dtype, offsets, values_of
from tests.ops.reference import assert_attention, attend, join, seen
from tests.ops.test_decode import bf16_products

KV_LENS = [1, 0, 9, 64, 33, 700]
QO_LENS = [1, 3, 0, 64, 40, 70]


def pack(masks):
    """FlashInfer's packed mask: bits of each sequence from a new byte, the lowest first."""
    return np.concatenate([np.packbits(mask.reshape(-1), bitorder="little") for mask in masks])


def check(batch, rows, q_dtype="float32", *, plan=None, run=None, masks=None, **options):
    shape = batch.shape
    q = batch.queries(rows, q_dtype)
    wrapper = ops.BatchPrefillWithPagedKVCacheWrapper(None, batch.layout)
    heads = (shape.num_qo_heads, shape.num_kv_heads, shape.head_dim)
    given = {**options, **(plan or {})}
    if "soft_cap" in given:
        given["logits_soft_cap"] = given.pop("soft_cap")
    wrapper.plan(
        offsets(rows), *batch.lists, *heads, batch.page_size, head_dim_vo=shape.dim_vo, **given
    )
    out, lse = wrapper.run(q, batch.cache, return_lse=True, **(run or {}))
    plan, run = plan or {}, run or {}
    expected = batch.expected(
        q,
        rows,
        q_dtype,
        masks=masks,
        **options,
        alibi=plan.get("pos_encoding_mode") == "ALIBI",
        rope=(1e4, 1.0) if plan.get("pos_encoding_mode") == "ROPE_LLAMA" else None,
        sinks=run.get("sinks"),
    )
    assert out.dtype == q.dtype
    assert_attention(
        values_of(out, q_dtype),
        lse,
        expected,
        dtype=q_dtype,
        lse_base=run.get("lse_base", "log2"),
        bf16_products=bf16_products(q_dtype, batch.kv_dtype),
    )
    return out, lse


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sinks(isa, dtype):
    batch = Paged(np.random.default_rng(16), KV_LENS, 16, kv_dtype=dtype)
    sinks = np.array([0.5, -2.0, 6.0, 0.0], np.float32)
    check(batch, QO_LENS, dtype, run={"sinks": sinks}, causal=True, window_left=40)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_pages(isa, causal, layout, dtype):
    rng = np.random.default_rng(1)
    page_size = {"float32": 1, "float16": 16, "bfloat16": 64}[dtype]
    batch = Paged(rng, KV_LENS, page_size, Shape(6, 3, 64), dtype, layout, layout == "NHD")
    check(batch, QO_LENS, dtype, causal=causal)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dim_vo"),
    [(1, 1, 128, 128), (8, 1, 80, 80), (3, 3, 256, 256), (2, 1, 192, 128), (4, 2, 72, 40)],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads(isa, heads, kv_heads, head_dim, dim_vo, dtype):
    rng = np.random.default_rng(head_dim)
    shape = Shape(heads, kv_heads, head_dim, dim_vo)
    check(Paged(rng, [5, 130], 7, shape, dtype), [5, 37], dtype, causal=True)


@pytest.mark.parametrize("window", [0, 20, 100])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("causal", [False, True])
def test_windows_and_caps(isa, window, soft_cap, causal):
    batch = Paged(np.random.default_rng(2), KV_LENS, 16)
    check(batch, QO_LENS, window_left=window, soft_cap=soft_cap, sm_scale=0.3, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
def test_alibi(isa, causal):
    batch = Paged(np.random.default_rng(3), KV_LENS, 16, Shape(6, 2, 64))
    check(batch, QO_LENS, plan={"pos_encoding_mode": "ALIBI"}, causal=causal)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rotated(isa, dtype):
    batch = Paged(np.random.default_rng(4), [1, 0, 40, 200], 16, kv_dtype=dtype)
    check(batch, [1, 2, 40, 30], dtype, plan={"pos_encoding_mode": "ROPE_LLAMA"}, causal=True)


def random_masks(rng, qo_lens, kv_lens):
    masks = [rng.random((n, m)) < 0.4 for n, m in zip(qo_lens, kv_lens, strict=True)]
    for mask in masks:
        mask[: len(mask) // 5] = False  # rows that see nothing
        mask[:, 64:128] = False  # a whole block that nothing sees
    return masks


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_masks(isa, packed, dtype):
    rng = np.random.default_rng(5)
    batch = Paged(rng, KV_LENS, 16, Shape(4, 2, 64), dtype)
    masks = random_masks(rng, QO_LENS, KV_LENS)
    flat = np.concatenate([mask.reshape(-1) for mask in masks])
    plan = {"packed_custom_mask": pack(masks)} if packed else {"custom_mask": flat}
    check(batch, QO_LENS, dtype, plan=plan, masks=masks, causal=True)
    check(batch, QO_LENS, dtype, plan=plan, masks=masks, window_left=70)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ragged(isa, layout, dtype):
    rng = np.random.default_rng(6)
    starts, rows = offsets(KV_LENS), offsets(QO_LENS)
    q = as_dtype(rng.standard_normal((rows[-1], 4, 64), np.float32), dtype)
    k = as_dtype(rng.standard_normal((starts[-1], 2, 64), np.float32), dtype)
    v = as_dtype(rng.standard_normal((starts[-1], 2, 96), np.float32), dtype)
    given = [k, v] if layout == "NHD" else [x.swapaxes(0, 1).copy() for x in (k, v)]
    exact = [values_of(x, dtype) for x in (q, k, v)]
    wrapper = ops.BatchPrefillWithRaggedKVCacheWrapper(None, layout)
    for causal in (False, True):
        wrapper.plan(rows, starts, 4, 2, 64, head_dim_vo=96, causal=causal)
        out, lse = wrapper.run(q, *given, return_lse=True, lse_base="ln")
        expected = join(
            [
                attend(
                    exact[0][rows[s] : rows[s + 1]],
                    exact[1][starts[s] : starts[s + 1]],
                    exact[2][starts[s] : starts[s + 1]],
                    seen(QO_LENS[s], KV_LENS[s], causal),
                )
                for s in range(len(KV_LENS))
            ]
        )
        options = {"dtype": dtype, "lse_base": "ln", "bf16_products": bf16_products(dtype, dtype)}
        assert_attention(values_of(out, dtype), lse, expected, **options)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_single(isa, layout):
    rng = np.random.default_rng(7)
    q = rng.standard_normal((70, 6, 64), np.float32)
    k, v = rng.standard_normal((2, 130, 2, 64), np.float32)
    given = [k, v] if layout == "NHD" else [x.swapaxes(0, 1).copy() for x in (k, v)]
    options = {"kv_layout": layout, "return_lse": True}
    got = ops.single_prefill_with_kv_cache(q, *given, causal=True, **options)
    assert_attention(*got, attend(q, k, v, seen(70, 130, True)))
    mask = rng.random((70, 130)) < 0.3
    got = ops.single_prefill_with_kv_cache(q, *given, custom_mask=mask, causal=True, **options)
    expected = attend(q, k, v, mask)
    assert_attention(*got, expected)
    again = ops.single_prefill_with_kv_cache(q, *given, packed_custom_mask=pack([mask]), **options)
    np.testing.assert_array_equal(again[0], got[0])
    got = ops.single_prefill_with_kv_cache(
        q, *given, pos_encoding_mode="ROPE_LLAMA", rope_theta=1e5, rope_scale=4.0, **options
    )
    assert_attention(*got, attend(q, k, v, seen(70, 130), rope=(1e5, 4.0)))


def test_single_as_torch():
    rng = np.random.default_rng(8)
    q, k, v = (torch.from_numpy(rng.standard_normal((33, 4, 64), np.float32)) for _ in range(3))
    out = ops.single_prefill_with_kv_cache(q, k, v, causal=True)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True
    )
    torch.testing.assert_close(out, expected[0].transpose(0, 1))
    # Views of one projection, as models have them.
    qkv = torch.stack([q, k, v], dim=1)
    views = (qkv[:, 0], qkv[:, 1], qkv[:, 2])
    assert torch.equal(ops.single_prefill_with_kv_cache(*views, causal=True), out)


def test_a_long_sequence(isa):
    rng = np.random.default_rng(9)
    batch = Paged(rng, [3001], 16, Shape(2, 1, 64), "bfloat16")
    check(batch, [65], "bfloat16", causal=True)


def test_rows_do_not_depend_on_the_batch(isa):
    rng = np.random.default_rng(10)
    batch = Paged(rng, [300, 77], 16)
    out, lse = check(batch, [90, 77], causal=True)
    q = np.random.default_rng(10)  # the same draws again
    again = Paged(q, [300, 77], 16)
    out_again, lse_again = check(again, [90, 77], causal=True)
    np.testing.assert_array_equal(out, out_again)
    np.testing.assert_array_equal(lse, lse_again)


def i32(*values):
    return np.array(values, np.int32)


PLAN = {
    "qo_indptr": i32(0, 2, 3),
    "paged_kv_indptr": i32(0, 1, 3),
    "paged_kv_indices": i32(0, 1, 2),
    "paged_kv_last_page_len": i32(4, 1),
    "num_qo_heads": 4,
    "num_kv_heads": 2,
    "head_dim_qk": 64,
    "page_size": 4,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qo_indptr": i32(0, 2)}, "qo_indptr: expected 3 values, got 2"),
        ({"qo_indptr": i32(0, 2, 1)}, "qo_indptr: expected values that never decrease"),
        ({"paged_kv_indptr": i32(0, 2, 4)}, "paged_kv_indptr: expected at most 3"),
        ({"paged_kv_last_page_len": i32(4, 9)}, r"paged_kv_last_page_len\[1\]: expected 1 to"),
        ({"custom_mask": np.ones(12, bool)}, "custom_mask: expected bool of 13 values"),
        ({"custom_mask": np.ones(13)}, "custom_mask: expected bool of 13 values"),
        (
            {"packed_custom_mask": np.ones(3, np.uint8)},
            r"packed_custom_mask: expected uint8 \(2,\)",
        ),
        ({"packed_custom_mask": np.ones(2, bool)}, "packed_custom_mask: expected uint8"),
        ({"window_left": -2}, "window_left: expected -1 or more"),
    ],
)
def test_errors(changes, message):
    with pytest.raises(InvalidArgumentError, match=r"^\[.*\] " + message):
        ops.BatchPrefillWithPagedKVCacheWrapper().plan(**(PLAN | changes))


def test_errors_of_ragged_runs():
    wrapper = ops.BatchPrefillWithRaggedKVCacheWrapper()
    with pytest.raises(InvalidArgumentError, match=r"expected plan\(\) before run\(\)"):
        wrapper.run(None, None, None)
    wrapper.plan(i32(0, 2), i32(0, 5), 2, 1, 64)
    q, k = np.zeros((2, 2, 64), np.float32), np.zeros((5, 1, 64), np.float32)
    for arguments in [(q, k[:4], k[:4]), (q, k, k[:4]), (q, k[:, 0], k), (q, k, k[..., :8])]:
        with pytest.raises(InvalidArgumentError, match=r"^\[.*\] (k|v): expected"):
            wrapper.run(*arguments)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 64), (3, 1, 64), (3, 1, 64)), "q: expected 3 dimensions"),
        (((2, 2, 64), (3, 64), (3, 1, 64)), "k: expected 3 dimensions"),
        (((2, 2, 64), (3, 1, 64), (4, 1, 64)), "v: expected shape"),
        (((2, 2, 64), (3, 1, 32), (3, 1, 64)), "k: expected head_dim 64 of q"),
        (((2, 2, 64), (3, 4, 64), (3, 4, 64)), "num_qo_heads: expected a multiple of 4"),
    ],
)
def test_errors_of_single_prefill(shapes, message):
    arrays = [np.zeros(shape, np.float32) for shape in shapes]
    with pytest.raises(InvalidArgumentError, match=r"^\[single_prefill_with_kv_cache\] " + message):
        ops.single_prefill_with_kv_cache(*arrays)


def test_random_lists(isa):
    """Any lists: a typed error, or the attention that they describe."""
    rng = np.random.default_rng(11)
    worked = 0
    for _ in range(60):
        count = int(rng.integers(1, 4))
        kv, rows = (
            np.cumsum(rng.integers(-(rng.random() < 0.1), 6, count + 1)).astype(np.int32)
            for _ in range(2)
        )
        kv, rows = kv - kv[0], rows - rows[0]
        q = rng.standard_normal((max(rows[-1], 0), 2, 16), np.float32)
        size = max(int(kv[-1] + rng.integers(-1, 2)), 0)
        k, v = rng.standard_normal((2, size, 1, 16), np.float32)
        wrapper = ops.BatchPrefillWithRaggedKVCacheWrapper()
        causal = bool(rng.integers(2))
        try:
            wrapper.plan(rows, kv, 2, 1, 16, causal=causal)
            out, lse = wrapper.run(q, k, v, return_lse=True)
        except InvalidArgumentError:
            continue
        worked += 1
        parts = []
        for s in range(count):
            mask = seen(rows[s + 1] - rows[s], kv[s + 1] - kv[s], causal)
            tokens = slice(kv[s], kv[s + 1])
            parts.append(attend(q[rows[s] : rows[s + 1]], k[tokens], v[tokens], mask))
        assert_attention(out, lse, join(parts))
    assert worked > 10

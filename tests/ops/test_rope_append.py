"""Appending to paged KV: places, rounding, and equality with the unfused operators."""

import numpy as np
import pytest

from effinfer import _core, ops
from tests.ops.attention_reference import Batch, make_batch

DTYPES = ["f32", "f16", "bf16", "i8"]


def to_bf16(x):
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def stored(x: np.ndarray, dtype: str) -> np.ndarray:
    """What a page gives back for x [..., head_dim]."""
    if dtype == "f32":
        return x
    if dtype == "f16":
        return x.astype(np.float16).astype(np.float32)
    if dtype == "bf16":
        return to_bf16(x)
    highest = np.abs(x).max(axis=-1, keepdims=True)
    return np.rint(x * (np.float32(127) / highest)) * (highest / np.float32(127))


def logical(batch: Batch, pool: np.ndarray) -> np.ndarray:
    """The rows of the batch's query tokens as their pages hold them."""
    rows = []
    for s, length in enumerate(batch.kv_len):
        count = batch.qo_indptr[s + 1] - batch.qo_indptr[s]
        pages = pool[batch.pages(s)].transpose(0, 2, 1, 3)
        tokens = pages.reshape(-1, pool.shape[1], pool.shape[3])
        rows.append(tokens[length - count : length])
    return np.concatenate(rows)


def inputs(rng, batch, heads, kv_heads, head_dim, rope_dims):
    count = int(batch.qo_indptr[-1])
    q, k, v = (
        rng.standard_normal((count, n, head_dim), np.float32) for n in (heads, kv_heads, kv_heads)
    )
    angles = rng.uniform(0, 100, (count, rope_dims // 2))
    table = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    return q, k, v, table


@pytest.mark.parametrize("dtype", DTYPES)
def test_append_stores_rounded_rows_at_their_places(isa, dtype):
    rng = np.random.default_rng(0)
    batch = make_batch(rng, [1, 64, 65, 200, 130], [1, 64, 2, 70, 0])
    kv = _core.PagedKv(batch.num_pages, 3, 48, dtype)
    _, k, v, _ = inputs(rng, batch, 3, 3, 48, 2)
    k *= 100.0
    _core.kv_append(kv, k, v, *batch.lists)
    k_pages, v_pages = kv.to_numpy()
    np.testing.assert_array_equal(logical(batch, k_pages), stored(k, dtype))
    np.testing.assert_array_equal(logical(batch, v_pages), stored(v, dtype))
    # Nothing else was written.
    assert np.count_nonzero(k_pages) == np.count_nonzero(stored(k, dtype))
    assert np.count_nonzero(v_pages) == np.count_nonzero(stored(v, dtype))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_16_bit_ties_round_to_even_and_extremes_survive(isa, dtype):
    batch = make_batch(np.random.default_rng(0), [1], [1])
    kv = _core.PagedKv(batch.num_pages, 1, 16, dtype)
    step = 2.0**-10 if dtype == "f16" else 2.0**-7
    values = [1 + step / 2, 1 + 1.5 * step, -1 - step / 2, 0.0, np.inf, -np.inf, 65504, 1e-7]
    row = np.array([*values, *values], np.float32).reshape(1, 1, 16)
    _core.kv_append(kv, row, row, *batch.lists)
    k_pages, v_pages = kv.to_numpy()
    np.testing.assert_array_equal(logical(batch, k_pages), stored(row, dtype))
    np.testing.assert_array_equal(logical(batch, v_pages), stored(row, dtype))
    nan = np.full_like(row, np.nan)
    _core.kv_append(kv, nan, nan, *batch.lists)
    assert np.isnan(logical(batch, kv.to_numpy()[0])).all()


def test_i8_zero_and_non_finite_heads(isa):
    batch = make_batch(np.random.default_rng(0), [3], [3])
    kv = _core.PagedKv(batch.num_pages, 1, 16, "i8")
    rows = np.zeros((3, 1, 16), np.float32)
    rows[1, 0, 4] = np.inf
    rows[2, 0, 5] = np.nan
    _core.kv_append(kv, rows, rows, *batch.lists)
    for pool in kv.to_numpy():
        got = logical(batch, pool)
        assert (got[0] == 0).all()
        assert np.isnan(got[1:]).all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rope_dims"), [(64, 64), (80, 20), (128, 96), (16, 2)])
def test_rotation(isa, interleaved, head_dim, rope_dims):
    rng = np.random.default_rng(head_dim)
    batch = make_batch(rng, [5, 70], [5, 33])
    q, k, v, table = inputs(rng, batch, 6, 2, head_dim, rope_dims)
    kv = _core.PagedKv(batch.num_pages, 2, head_dim, "f32")
    q_out = _core.rope_append(kv, q, k, v, table, *batch.lists, interleaved=interleaved)

    def rotated(x):
        out = x.astype(np.float64)
        half = rope_dims // 2
        first = slice(0, rope_dims, 2) if interleaved else slice(0, half)
        second = slice(1, rope_dims, 2) if interleaved else slice(half, rope_dims)
        cos, sin = (table[:, i, None, :].astype(np.float64) for i in (0, 1))
        a, b = out[..., first].copy(), out[..., second].copy()
        out[..., first] = a * cos - b * sin
        out[..., second] = b * cos + a * sin
        return out

    np.testing.assert_allclose(q_out, rotated(q), rtol=0, atol=2e-6)
    k_pages, v_pages = kv.to_numpy()
    np.testing.assert_allclose(logical(batch, k_pages), rotated(k), rtol=0, atol=2e-6)
    np.testing.assert_array_equal(logical(batch, v_pages), v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norms", [False, True])
def test_equals_the_unfused_operators(isa, dtype, interleaved, norms):
    rng = np.random.default_rng(7)
    batch = make_batch(rng, [66, 40], [66, 9])
    q, k, v, table = inputs(rng, batch, 6, 2, 80, 64)
    q_norm, k_norm = rng.standard_normal((2, 80), np.float32)
    fused = _core.PagedKv(batch.num_pages, 2, 80, dtype)
    weights = {"q_norm": q_norm, "k_norm": k_norm} if norms else {}
    q_out = _core.rope_append(
        fused, q, k, v, table, *batch.lists, **weights, eps=1e-5, interleaved=interleaved
    )
    if norms:
        q, k = (ops.rmsnorm(x, w, 1e-5) for x, w in ((q, q_norm), (k, k_norm)))
    angles = table.reshape(len(table), -1)
    rotated = np.empty_like(q), np.empty_like(k)
    _core.apply_rope(q, k, angles, None, interleaved, *rotated)
    q, k = rotated
    plain = _core.PagedKv(batch.num_pages, 2, 80, dtype)
    _core.kv_append(plain, k, v, *batch.lists)
    np.testing.assert_array_equal(q_out, q)
    for got, expected in zip(fused.to_numpy(), plain.to_numpy(), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_depend_on_the_row_alone(isa, dtype):
    rng = np.random.default_rng(8)
    batch = make_batch(rng, [150], [150])
    q, k, v, table = inputs(rng, batch, 4, 2, 32, 32)
    norms = {"q_norm": rng.standard_normal(32, np.float32), "k_norm": np.ones(32, np.float32)}
    together = _core.PagedKv(batch.num_pages, 2, 32, dtype)
    q_together = _core.rope_append(
        together,
        q,
        k,
        v,
        table,
        *batch.lists,
        **norms,
        pool=_core.ThreadPool(3, oversubscribe=True),
    )
    for step in (1, 7, 64):
        pieces = _core.PagedKv(batch.num_pages, 2, 32, dtype)
        for first in range(0, 150, step):
            rows = slice(first, min(first + step, 150))
            lists = batch.part(0, rows.start, rows.stop).lists
            got = _core.rope_append(pieces, q[rows], k[rows], v[rows], table[rows], *lists, **norms)
            np.testing.assert_array_equal(got, q_together[rows])
        for got, expected in zip(pieces.to_numpy(), together.to_numpy(), strict=True):
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": np.zeros((2, 2, 16), np.float32)}, r"k: expected shape \[2, 1, 16\]"),
        ({"v": np.zeros((1, 1, 16), np.float32)}, r"v: expected shape \[2, 1, 16\]"),
        ({"v": np.zeros((2, 1, 16), np.int32)}, "v: expected dtype f32"),
        ({"table": np.zeros((2, 2, 9), np.float32)}, r"table: expected shape \[2, 2, at most 8\]"),
        ({"q_norm": np.zeros(15, np.float32)}, r"q_norm: expected shape \[16\]"),
        ({"kv_len": np.array([1], np.int32)}, r"kv_len\[0\]: expected at least its 2 query rows"),
    ],
)
def test_errors(changes, message):
    arguments = {
        "kv": _core.PagedKv(1, 1, 16),
        "q": np.zeros((2, 3, 16), np.float32),
        "k": np.zeros((2, 1, 16), np.float32),
        "v": np.zeros((2, 1, 16), np.float32),
        "table": np.zeros((2, 2, 8), np.float32),
        "qo_indptr": np.array([0, 2], np.int32),
        "kv_indptr": np.array([0, 1], np.int32),
        "kv_indices": np.array([0], np.int32),
        "kv_len": np.array([2], np.int32),
    } | changes
    with pytest.raises(_core.InvalidArgumentError, match=r"^\[rope_append\] " + message):
        _core.rope_append(**arguments)

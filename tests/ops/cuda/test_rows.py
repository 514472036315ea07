"""Norms, activations, rotations, states and small operators on a GPU, as on the CPU."""

import numpy as np
import pytest

from effinfer import ops
from tests.ops.cuda.gpu_arrays import here, there
from tests.ops.rows import DTYPES, assert_rounded, random
from tests.ops.test_norm import rms, wide

SHAPES = [(1, 1), (3, 17), (5, 576), (0, 8), (2, 3, 40)]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_shape = pytest.mark.parametrize("shape", SHAPES)


@every_dtype
@every_shape
def test_norms(shape, dtype):
    x, weight = random(0, *shape, dtype=dtype, spread=3), random(1, shape[-1], dtype=dtype)
    terms = shape[-1]
    out = here(ops.rmsnorm(there(x), there(weight), 1e-5))
    assert_rounded(out, rms(wide(x), wide(weight), 1e-5), dtype, terms=terms)
    out = here(ops.gemma_rmsnorm(there(x), there(weight)))
    scale = rms(np.abs(wide(x)), 1 + np.abs(wide(weight)))
    assert_rounded(out, rms(wide(x), 1 + wide(weight)), dtype, terms=terms, magnitude=scale)
    residual = random(2, *shape, dtype=dtype)
    rows, sums = there(x), there(residual)
    assert ops.fused_add_rmsnorm(rows, sums, there(weight)) is None
    total = wide(x) + wide(residual)
    assert_rounded(here(sums), total, dtype, magnitude=np.abs(wide(x)) + np.abs(wide(residual)))
    assert_rounded(
        here(rows), rms(total, wide(weight)), dtype, terms=terms, magnitude=np.full(1, 9)
    )
    beta = random(3, shape[-1], dtype=dtype)
    out = here(ops.layernorm(there(x), there(weight), there(beta)))
    np.testing.assert_allclose(
        wide(out), wide(ops.layernorm(x, weight, beta)), rtol=2 * DTYPES[dtype][1], atol=2e-2
    )


@every_dtype
def test_rows_may_be_strided(dtype):
    fused, weight = random(4, 7, 3, 4, 40, dtype=dtype), random(5, 40, dtype=dtype)
    part = there(fused)[1:, 1]
    expected = ops.rmsnorm(fused[1:, 1], weight)
    actual = here(ops.rmsnorm(part, there(weight)))
    np.testing.assert_allclose(wide(actual), wide(expected), rtol=8 * DTYPES[dtype][1])


@every_dtype
@pytest.mark.parametrize("shape", [(3, 2), (4, 514), (0, 8), (2, 3, 80)])
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
def test_gated_activations(name, shape, dtype):
    x = random(6, *shape, dtype=dtype)
    op = getattr(ops, name)
    actual = here(op(there(x)))
    assert actual.shape == (*shape[:-1], shape[-1] // 2)
    expected = wide(op(x.astype(np.float32)))
    np.testing.assert_allclose(wide(actual), expected, rtol=2 * DTYPES[dtype][1], atol=1e-6)
    out = there(np.zeros_like(actual))
    assert op(there(x), out) is out


@every_dtype
@pytest.mark.parametrize("positions", [np.int32, np.int64])
@pytest.mark.parametrize("interleave", [False, True])
def test_rotations(dtype, positions, interleave):
    qkv = random(7, 5, 3, 4, 48, dtype=dtype)
    at = np.array([3, 0, 1000, 17, 4], positions)
    options = {"rotary_dim": 32, "interleave": interleave, "rope_scale": 2.0}
    tolerance = {"rtol": 2 * DTYPES[dtype][1], "atol": 4 * DTYPES[dtype][1]}
    for op in (ops.apply_rope_pos_ids, ops.apply_llama31_rope_pos_ids):
        expected = op(qkv[:, 0], qkv[:, 1], at, **options)
        fused = there(qkv)
        made = op(fused[:, 0], fused[:, 1], there(at), **options)
        for one, other in zip(made, expected, strict=True):
            np.testing.assert_allclose(wide(here(one)), wide(other), **tolerance)
        np.testing.assert_array_equal(wide(here(fused)), wide(qkv))
    ops.apply_rope_pos_ids_inplace(fused[:, 0], fused[:, 1], there(at), **options)
    expected = ops.apply_rope_pos_ids(qkv[:, 0], qkv[:, 1], at, **options)
    np.testing.assert_allclose(wide(here(fused)[:, 1]), wide(expected[1]), **tolerance)
    np.testing.assert_array_equal(wide(here(fused)[:, 2]), wide(qkv[:, 2]))


@every_dtype
@pytest.mark.parametrize("positions", [np.int32, np.int64])
def test_rotations_by_a_table(dtype, positions):
    qk = random(8, 5, 6 * 32, dtype=dtype)
    at = np.array([2, 0, 9, 9, 4], positions)
    frequencies, _ = ops.rope_frequencies(32)
    steps = np.arange(10, dtype=np.int32)
    cache = ops.rope_table(steps, frequencies).reshape(
        (
            10,
            32,
        )
    )
    table = ops.rope_table(there(steps), frequencies)
    np.testing.assert_allclose(
        here(table).reshape(
            (
                10,
                32,
            )
        ),
        cache,
        atol=1e-6,
    )
    for is_neox in (True, False):
        expected = ops.apply_rope_with_cos_sin_cache(
            at, qk[:, :128], qk[:, 128:], 32, cache, is_neox
        )
        x = there(qk)
        given = there(at), x[:, :128], x[:, 128:], 32, there(cache), is_neox
        made = ops.apply_rope_with_cos_sin_cache(*given)
        ops.apply_rope_with_cos_sin_cache_inplace(*given)
        tolerance = {"rtol": 2 * DTYPES[dtype][1], "atol": 4 * DTYPES[dtype][1]}
        for one, inplace, other in zip(made, given[1:3], expected, strict=True):
            np.testing.assert_allclose(wide(here(one)), wide(other), **tolerance)
            np.testing.assert_array_equal(wide(here(inplace)), wide(here(one)))


@pytest.mark.parametrize("lists", [np.int32, np.int64])
def test_rotations_of_ragged_sequences(lists):
    x = random(9, 9, 4, 32)
    indptr, offsets = np.array([0, 5, 5, 9], lists), np.array([3, 100, 0], lists)
    for name in ("apply_rope", "apply_llama31_rope"):
        op, inplace = getattr(ops, name), getattr(ops, f"{name}_inplace")
        expected = op(x[:, :3], x[:, 3:], indptr, offsets)
        there_x = there(x)
        given = there_x[:, :3], there_x[:, 3:], there(indptr), there(offsets)
        for one, other in zip(op(*given), expected, strict=True):
            np.testing.assert_allclose(here(one), other, rtol=1e-5, atol=1e-5)
        inplace(*given)
        np.testing.assert_allclose(here(given[1]), expected[1], rtol=1e-5, atol=1e-5)


@every_dtype
@pytest.mark.parametrize("base", ["log2", "ln"])
def test_states_merge(dtype, base):
    v = random(10, 6, 3, 2, 40, dtype=dtype)
    s = random(11, 6, 3, 2)
    s[1, :, 0] = -np.inf
    s[2, 1] = -np.inf
    tolerance = {"rtol": 4 * DTYPES[dtype][1], "atol": 4 * DTYPES[dtype][1]}
    expected = ops.merge_states(v, s, lse_base=base)
    made = ops.merge_states(there(v), there(s), lse_base=base)
    for one, other in zip(made, expected, strict=True):
        np.testing.assert_allclose(wide(here(one)), wide(other), **tolerance)
    pair = [np.ascontiguousarray(x) for x in (v[:, 0], s[:, 0], v[:, 1], s[:, 1])]
    expected = ops.merge_state(*pair, lse_base=base)
    made = ops.merge_state(*(there(x) for x in pair), lse_base=base)
    for one, other in zip(made, expected, strict=True):
        np.testing.assert_allclose(wide(here(one)), wide(other), **tolerance)
    mask = np.array([1, 0, 1, 1, 0, 1], bool)
    place = [there(x) for x in pair]
    ops.merge_state_in_place(*place, there(mask), lse_base=base)
    ops.merge_state_in_place(*pair, mask, lse_base=base)
    for one, other in zip(place[:2], pair[:2], strict=True):
        np.testing.assert_allclose(wide(here(one)), wide(other), **tolerance)


def test_small_operators():
    x, y = random(12, 3, 50), random(13, 3, 50)
    for name in ("silu", "gelu", "gelu_tanh", "relu_squared", "sigmoid"):
        op = getattr(ops, name)
        np.testing.assert_allclose(here(op(there(x))), op(x), rtol=1e-5, atol=1e-6)
    close = {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(here(ops.softcap(there(x), 2.0)), ops.softcap(x, 2.0), **close)
    np.testing.assert_array_equal(here(ops.scale(there(x), 2.0)), x * 2)
    np.testing.assert_array_equal(here(ops.add(there(x), there(y))), x + y)
    np.testing.assert_array_equal(here(ops.mul(there(x), there(y))), x * y)
    rows = np.array([2, 0, 2, 1], np.int32)
    np.testing.assert_array_equal(here(ops.select_rows(there(x), there(rows))), x[rows])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("rows", "pages"),
    [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("float32", "float16"),
        ("float16", "float32"),
    ],
)
@pytest.mark.parametrize("head_dim", [64, 10])
def test_append(layout, rows, pages, head_dim):
    page_size, heads = 4, 3
    kv_indptr, last = np.array([0, 2, 2, 5], np.int32), np.array([3, 1, 2], np.int32)
    kv_indices = np.array([6, 1, 0, 3, 5], np.int32)
    append_indptr = np.array([0, 4, 4, 9], np.int32)
    lengths = ops.get_seq_lens(kv_indptr, last, page_size)
    lengths[1] = 0
    places = ops.get_batch_indices_positions(append_indptr, lengths, 9)
    shape = (page_size, heads) if layout == "NHD" else (heads, page_size)
    cache = random(14, 7, 2, *shape, head_dim, dtype=pages)
    k, v = (random(seed, 9, heads, head_dim, dtype=rows) for seed in (15, 16))
    pool = there(cache)
    lists = kv_indices, kv_indptr, last
    ops.append_paged_kv_cache(
        there(k), there(v), *(there(x) for x in places), pool, *(there(x) for x in lists),
        kv_layout=layout,
    )  # fmt: skip
    ops.append_paged_kv_cache(k, v, *places, cache, *lists, kv_layout=layout)
    np.testing.assert_array_equal(wide(here(pool)), wide(cache))


def test_lists_of_an_append():
    starts, lengths = np.array([0, 4, 4, 9], np.int32), np.array([10, 3, 5], np.int32)
    for nnz in (9, 12):
        expected = ops.get_batch_indices_positions(starts, lengths, nnz)
        made = ops.get_batch_indices_positions(there(starts), there(lengths), nnz)
        for one, other in zip(made, expected, strict=True):
            np.testing.assert_array_equal(here(one), other)
    indptr, last = np.array([0, 2, 2, 5], np.int32), np.array([3, 0, 2], np.int32)
    made = ops.get_seq_lens(there(indptr), there(last), 16)
    np.testing.assert_array_equal(here(made), ops.get_seq_lens(indptr, last, 16))


def test_append_leaves_rows_of_no_sequence_out():
    places = ops.get_batch_indices_positions(np.array([0, 1], np.int32), np.array([1]), 3)
    cache = there(np.zeros((2, 2, 4, 1, 8), np.float32))
    rows = there(random(17, 3, 1, 8))
    lists = np.array([1], np.int32), np.array([0, 1], np.int32), np.array([1], np.int32)
    ops.append_paged_kv_cache(
        rows, rows, *(there(x) for x in places), cache, *(there(x) for x in lists)
    )
    assert np.count_nonzero(here(cache).any(-1)) == 2


def test_append_of_latent_caches():
    places = ops.get_batch_indices_positions(np.array([0, 3], np.int32), np.array([5], np.int32), 3)
    lists = np.array([2, 0], np.int32), np.array([0, 2], np.int32), np.array([1], np.int32)
    ckv, kpe = random(20, 3, 64), random(21, 3, 16)
    caches = [np.zeros((3, 4, dim), np.float32) for dim in (64, 16)]
    pools = [there(cache) for cache in caches]
    ops.append_paged_mla_kv_cache(ckv, kpe, *places, *caches, *lists)
    given = there(ckv), there(kpe), *(there(x) for x in places), *pools
    ops.append_paged_mla_kv_cache(*given, *(there(x) for x in lists))
    for pool, cache in zip(pools, caches, strict=True):
        np.testing.assert_array_equal(here(pool), cache)

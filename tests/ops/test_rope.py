"""Rotation of queries and keys."""

import numpy as np
import pytest
import torch

from effinfer import InvalidArgumentError, _core, ops, testing
from tests.ops.rows import DTYPES, assert_rounded, random

LLAMA31 = {
    "scaling": "llama3",
    "theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position": 8192.0,
}
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
both_pairings = pytest.mark.parametrize("interleave", [False, True])


def angles_of(positions, dims, **parameters):
    """The float32 angles of the reference implementations."""
    inv_freq, _ = ops.rope_frequencies(dims, **{"theta": 1e4, **parameters})
    return (np.asarray(positions, np.float32)[:, None] * inv_freq).astype(np.float64)


def rotate(x, angles, interleave):
    """x [T, H, D] by angles [T, dims / 2], in float64."""
    half = angles.shape[1]
    dims = 2 * half
    out = x.astype(np.float64)
    pairs = (slice(0, half), slice(half, dims))
    if interleave:
        pairs = (slice(0, dims, 2), slice(1, dims, 2))
    a, b = out[..., pairs[0]].copy(), out[..., pairs[1]].copy()
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    out[..., pairs[0]], out[..., pairs[1]] = a * cos - b * sin, b * cos + a * sin
    return out


def check(actual, x, angles, interleave, dtype):
    norms = np.linalg.norm(x.astype(np.float64), axis=-1, keepdims=True)
    expected = rotate(x, angles, interleave)
    assert_rounded(actual, expected, dtype, terms=2, magnitude=np.broadcast_to(norms, x.shape))
    dims = 2 * angles.shape[1]
    np.testing.assert_array_equal(actual[..., dims:], x[..., dims:])


@both_pairings
@every_dtype
@pytest.mark.parametrize(
    ("tokens", "heads", "head_dim", "dims"),
    [
        (1, 1, 2, 2),
        (5, 3, 64, None),
        (7, 2, 80, 80),
        (3, 9, 128, 96),
        (4, 1, 34, 22),
        (0, 2, 8, 8),
        (2, 1, 256, None),
    ],
)
def test_pos_ids(isa, interleave, dtype, tokens, heads, head_dim, dims):
    q = random(1, tokens, heads, head_dim, dtype=dtype)
    k = random(2, tokens, 2, head_dim, dtype=dtype)
    positions = np.random.default_rng(0).integers(0, 4096, tokens)
    out_q, out_k = ops.apply_rope_pos_ids(q, k, positions, dims, interleave)
    angles = angles_of(positions, dims or head_dim)
    check(out_q, q, angles, interleave, dtype)
    check(out_k, k, angles, interleave, dtype)
    in_place = q.copy(), k.copy()
    result = ops.apply_rope_pos_ids_inplace(*in_place, positions.astype(np.int32), dims, interleave)
    assert result is None
    np.testing.assert_array_equal(in_place[0], out_q)
    np.testing.assert_array_equal(in_place[1], out_k)


@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_ragged_sequences(index):
    lengths, offsets = np.array([3, 0, 1, 7]), np.array([5, 9, 0, 1000], index)
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(index)
    positions = np.concatenate([o + np.arange(n) for o, n in zip(offsets, lengths, strict=True)])
    q, k = random(3, 11, 4, 16), random(4, 11, 2, 16)
    for interleave in (False, True):
        expected = ops.apply_rope_pos_ids(q, k, positions, 8, interleave, 2.0, 5e5)
        out = ops.apply_rope(q, k, indptr, offsets, 8, interleave, 2.0, 5e5)
        np.testing.assert_array_equal(out[0], expected[0])
        np.testing.assert_array_equal(out[1], expected[1])
        angles = angles_of(positions, 8, theta=5e5, scaling="linear", factor=2.0)
        check(out[0], q, angles, interleave, "float32")
        in_place = q.copy(), k.copy()
        ops.apply_rope_inplace(*in_place, indptr, offsets, 8, interleave, 2.0, 5e5)
        np.testing.assert_array_equal(in_place[1], expected[1])


def test_llama31():
    q, k = random(5, 6, 4, 64), random(6, 6, 2, 64)
    positions = np.array([0, 1, 500, 8191, 100_000, 3], np.int32)
    out = ops.apply_llama31_rope_pos_ids(q, k, positions)
    check(out[0], q, angles_of(positions, 64, **LLAMA31), False, "float32")
    ragged = ops.apply_llama31_rope(q, k, np.array([0, 1, 2, 3, 4, 5, 6]), positions)
    in_place = [(q.copy(), k.copy()) for _ in range(2)]
    ops.apply_llama31_rope_pos_ids_inplace(*in_place[0], positions)
    ops.apply_llama31_rope_inplace(*in_place[1], np.array([0, 1, 2, 3, 4, 5, 6]), positions)
    for other in (ragged, *in_place):
        np.testing.assert_array_equal(other[0], out[0])
        np.testing.assert_array_equal(other[1], out[1])
    other = ops.apply_llama31_rope_pos_ids(q, k, positions, None, True, 2, 1e6, 2, 8, 4096)
    parameters = {**LLAMA31, "factor": 2.0, "theta": 1e6, "low_freq_factor": 2.0}
    parameters |= {"high_freq_factor": 8.0, "original_max_position": 4096.0}
    check(other[1], k, angles_of(positions, 64, **parameters), True, "float32")


@both_pairings
@every_dtype
def test_cos_sin_cache(isa, interleave, dtype):
    inv_freq, factor = ops.rope_frequencies(24)
    cache = ops.rope_table(np.arange(50, dtype=np.int32), inv_freq, factor).reshape(50, 24)
    q, k = random(7, 9, 3 * 32, dtype=dtype), random(8, 9, 32, dtype=dtype)
    positions = np.array([0, 49, 3, 3, 7, 20, 1, 2, 48])
    out = ops.apply_rope_with_cos_sin_cache(positions, q, k, 32, cache, not interleave)
    heads = q.reshape(9, 3, 32), k.reshape(9, 1, 32)
    expected = ops.apply_rope_pos_ids(*heads, positions, 24, interleave)
    np.testing.assert_array_equal(out[0], expected[0].reshape(q.shape))
    np.testing.assert_array_equal(out[1], expected[1].reshape(k.shape))
    qkv = np.concatenate([q, k, k], axis=1)
    parts = qkv[:, :96], qkv[:, 96:128]
    rotated = ops.apply_rope_with_cos_sin_cache_inplace(
        positions, *parts, 32, cache, not interleave
    )
    assert rotated is None
    np.testing.assert_array_equal(parts[0], out[0])
    np.testing.assert_array_equal(parts[1], out[1])
    np.testing.assert_array_equal(qkv[:, 128:], k)


@every_dtype
def test_torch_slices_of_a_fused_product_are_rotated_where_they_lie(dtype):
    qkv = torch.randn(5, 8, 64).to(getattr(torch, dtype))
    before = qkv.clone()
    positions = torch.arange(5)
    q, k = qkv[:, :4], qkv[:, 4:6]
    expected = ops.apply_rope_pos_ids(q, k, positions)
    assert expected[0].dtype == qkv.dtype
    ops.apply_rope_pos_ids_inplace(q, k, positions)
    assert torch.equal(qkv[:, :4], expected[0])
    assert torch.equal(qkv[:, 4:6], expected[1])
    assert torch.equal(qkv[:, 6:], before[:, 6:])


@every_dtype
def test_same_bits_at_every_isa_level_and_in_any_batch(dtype):
    q, positions = random(9, 20, 3, 80, dtype=dtype), np.arange(20) * 37
    for interleave in (False, True):
        expected = ops.apply_rope_pos_ids(q, q, positions, None, interleave)[0]
        for level in testing.available_isas():
            with testing.isa(level):
                pool = _core.ThreadPool(3, oversubscribe=True)
                out = ops.apply_rope_pos_ids(q, q, positions, None, interleave, pool=pool)
                np.testing.assert_array_equal(out[0], expected)
                one = ops.apply_rope_pos_ids(q[7:8], q[7:8], positions[7:8], None, interleave)
                np.testing.assert_array_equal(one[0], expected[7:8])


def heads(*shape, dtype="float32"):
    return random(0, *shape, dtype=dtype)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ops.apply_rope_pos_ids(heads(3, 8), heads(3, 1, 8), np.arange(3)),
            r"\[apply_rope_pos_ids\] q: expected 3 dimensions, got shape \[3, 8\]",
        ),
        (
            lambda: ops.apply_rope_pos_ids(heads(3, 2, 8), heads(3, 1, 8), np.arange(2)),
            r"\[apply_rope_pos_ids\] q: expected 2 rows, got shape \[3, 2, 8\]",
        ),
        (
            lambda: ops.apply_rope_pos_ids(heads(3, 2, 8), heads(2, 1, 8), np.arange(3)),
            r"\[apply_rope_pos_ids\] k: expected 3 rows, got shape \[2, 1, 8\]",
        ),
        (
            lambda: ops.apply_rope_pos_ids(heads(3, 2, 8), heads(3, 1, 8), np.arange(3), 10),
            r"\[apply_rope_pos_ids\] cos_sin_cache: expected at most 8 rotated dimensions",
        ),
        (
            lambda: ops.apply_rope_pos_ids(heads(3, 2, 8), heads(3, 1, 8), np.arange(3), 3),
            r"\[apply_rope_pos_ids\] dims: expected a positive even number, got 3",
        ),
        (
            lambda: ops.apply_rope_pos_ids(heads(3, 2, 8), heads(3, 1, 8), np.zeros(3)),
            r"\[apply_rope_pos_ids\] positions: expected float32.*got float64",
        ),
        (
            lambda: ops.apply_rope_pos_ids(heads(3, 2, 16)[..., ::2], heads(3, 1, 8), np.arange(3)),
            r"\[apply_rope_pos_ids\] q: expected a contiguous last dimension",
        ),
        (
            lambda: ops.apply_rope(heads(3, 2, 8), heads(3, 1, 8), np.array([0, 2]), np.array([0])),
            r"\[apply_rope\] indptr: expected 3 last, got 2",
        ),
        (
            lambda: ops.apply_rope(
                heads(3, 2, 8), heads(3, 1, 8), np.array([0, 2, 1, 3]), np.zeros(3, np.int32)
            ),
            r"\[apply_rope\] indptr: expected values that never decrease, got 2 before 1",
        ),
        (
            lambda: ops.apply_rope(heads(3, 2, 8), heads(3, 1, 8), np.array([0, 3]), np.arange(2)),
            r"\[apply_rope\] offsets: expected shape \[1\], got \[2\]",
        ),
        (
            lambda: ops.apply_rope(
                heads(3, 2, 8), heads(3, 1, 8), np.array([0, 3]), np.array([2**31 - 2])
            ),
            r"\[apply_rope\] offsets: expected positions within int32",
        ),
        (
            lambda: ops.apply_rope_with_cos_sin_cache(
                np.array([0, 4]), heads(2, 16), heads(2, 8), 8, heads(4, 8)
            ),
            r"cos_sin_cache\] positions\[1\]: expected a value in \[0, 3\], got 4",
        ),
        (
            lambda: ops.apply_rope_with_cos_sin_cache(
                np.array([0, 1]), heads(2, 15), heads(2, 8), 8, heads(4, 8)
            ),
            r"cos_sin_cache\] query, key: expected shape \[T, heads \* 8\], got \(2, 15\)",
        ),
        (
            lambda: ops.apply_rope_with_cos_sin_cache(
                np.array([0, 1]), heads(2, 16), heads(2, 8), 8, heads(4, 8, dtype="float16")
            ),
            r"\[apply_rope_with_cos_sin_cache\] cos_sin_cache: expected dtype f32, got f16",
        ),
        (
            lambda: ops.apply_rope_pos_ids_inplace(
                np.broadcast_to(heads(3, 1, 8), (3, 2, 8)), heads(3, 1, 8), np.arange(3)
            ),
            r"\[apply_rope_pos_ids_inplace\] q: expected a writable array",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(InvalidArgumentError, match=message):
        call()

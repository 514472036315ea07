"""Norms and rotations that end in 8-bit floats, against float64."""

import ml_dtypes
import numpy as np
import pytest
import torch

from effinfer import InvalidArgumentError, _core, ops
from tests.ops.batches import Paged, Shape, offsets
from tests.ops.reference import rotate
from tests.ops.rows import DTYPES, random
from tests.tolerance import bound

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
every_dtype = pytest.mark.parametrize("dtype", list(DTYPES))
every_float8 = pytest.mark.parametrize("float8", list(LARGEST))


def tag(float8):
    return getattr(ops, float8)


def wide(x):
    return np.asarray(x).astype(np.float64)


def stored(x, float8):
    """What an array of 8-bit floats holds, of whichever library."""
    if isinstance(x, torch.Tensor):
        assert x.dtype == getattr(torch, float8)
        return x.double().numpy()
    return np.asarray(x).view(np.uint8).view(getattr(ml_dtypes, float8)).astype(np.float64)


def nearest(x, float8):
    limited = np.clip(x, -LARGEST[float8], LARGEST[float8])
    return torch.from_numpy(limited).float().to(getattr(torch, float8)).double().numpy()


def assert_nearest(actual, expected, float8, *, terms=1, magnitude=None):
    """`actual` is the nearest 8-bit number to what float32 arithmetic may give."""
    assert actual.shape == expected.shape
    got = stored(actual, float8)
    error = bound(np.abs(expected) if magnitude is None else magnitude, terms)
    low, high = nearest(expected - error, float8), nearest(expected + error, float8)
    assert ((low <= got) & (got <= high)).all()
    if expected.size > 100:
        assert (got == nearest(expected, float8)).mean() > 0.98


SHAPES = [(1, 1), (5, 33), (3, 4, 64), (7, 1000), (0, 16)]
every_shape = pytest.mark.parametrize("shape", SHAPES)


def rms(x, weight, eps=1e-6):
    x = wide(x)
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * wide(weight)


@every_dtype
@every_float8
@every_shape
def test_rmsnorm_quant(isa, shape, dtype, float8):
    x = random(0, *shape, dtype=dtype)
    for weights in ("float32", dtype):
        weight = random(1, shape[-1], dtype=weights)
        out = np.empty(shape, tag(float8))
        assert ops.rmsnorm_quant(out, x, weight, 0.02, 1e-5) is None
        assert_nearest(out, rms(x, weight, 1e-5) / 0.02, float8, terms=shape[-1])


@every_dtype
@every_float8
@every_shape
def test_fused_add_rmsnorm_quant(isa, shape, dtype, float8):
    x, residual = random(2, *shape, dtype=dtype), random(3, *shape, dtype=dtype)
    weight = random(4, shape[-1], dtype=dtype)
    out, sums, given = np.empty(shape, tag(float8)), residual.copy(), x.copy()
    ops.fused_add_rmsnorm_quant(out, given, sums, weight, np.array([0.5], np.float32))
    total = wide(x) + wide(residual)
    magnitude = np.abs(rms(total, weight) / 0.5) * 2
    assert_nearest(out, rms(total, weight) / 0.5, float8, terms=shape[-1], magnitude=magnitude)
    np.testing.assert_array_equal(given, x)
    # The residual has the bits that the norm without quantisation gives it.
    ops.fused_add_rmsnorm(x, residual, weight)
    np.testing.assert_array_equal(sums, residual)


@every_dtype
@every_float8
@every_shape
def test_layernorm_quant(isa, shape, dtype, float8):
    x = random(5, *shape, dtype=dtype)
    gemma, beta = random(6, shape[-1]), random(7, shape[-1])
    out = np.empty(shape, tag(float8))
    ops.layernorm_quant(out, x, gemma, beta, 0.25)
    centred = wide(x) - wide(x).mean(axis=-1, keepdims=True)
    deviation = np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + 1e-6)
    expected = (centred / deviation * wide(gemma) + wide(beta)) / 0.25
    magnitude = (np.abs(wide(x)) / deviation * np.abs(wide(gemma)) + np.abs(wide(beta))) / 0.25
    assert_nearest(out, expected, float8, terms=shape[-1], magnitude=magnitude)


@every_float8
def test_saturation_and_libraries(isa, float8):
    """What is too large is the largest, NaN stays; torch's and ml_dtypes' arrays are written."""
    limit = LARGEST[float8]
    x = np.array([[1.0, -1.0, 0.0, 1e-30], [np.nan, 1.0, 1.0, 1.0]], np.float32)
    out = torch.empty(2, 4, dtype=getattr(torch, float8))
    ops.rmsnorm_quant(out, torch.from_numpy(x), torch.ones(4), torch.tensor([1e-7]))
    np.testing.assert_array_equal(out[0, :3].double(), [limit, -limit, 0])
    assert out[1].isnan().all()
    both = np.zeros((2, 2, 4), getattr(ml_dtypes, float8))
    ops.rmsnorm_quant(both[:, 1], x, np.ones(4, np.float32), 1e-7)
    np.testing.assert_array_equal(stored(both[0, 1], float8), stored(out[0], float8))
    assert not stored(both[:, 0], float8).any()


def test_conversions(isa):
    """Every 8-bit number survives the way to float32 and back, and halves round to even."""
    bits = np.arange(256, dtype=np.uint8)
    for float8 in LARGEST:
        numbers = stored(bits, float8)
        back = np.empty(256, tag(float8))
        _core.convert_rows(numbers.astype(np.float32), back)
        finite = np.isfinite(numbers)
        np.testing.assert_array_equal(back.view(np.uint8)[finite], bits[finite])
        assert np.isnan(stored(back, float8)[np.isnan(numbers)]).all()
        rng = np.random.default_rng(8)
        x = (rng.standard_normal((70, 300)) * 2.0 ** rng.integers(-20, 18, (70, 300))).astype("f4")
        out = np.empty(x.shape, tag(float8))
        _core.convert_rows(x, out)
        np.testing.assert_array_equal(stored(out, float8), nearest(x.astype(np.float64), float8))


def test_errors_of_norms():
    x, weight = np.ones((2, 8), np.float16), np.ones(8, np.float32)
    out = np.empty((2, 8), ops.float8_e4m3fn)
    for changes, message in (
        ({"out": np.empty((2, 8), np.float16)}, "out: expected float8_e4m3fn or float8_e5m2"),
        ({"out": out[:1]}, r"out: expected float8_e4m3fn \(2, 8\)"),
        ({"scale": 0.0}, "scale: expected a positive number, got 0"),
        ({"scale": np.ones(2, np.float32)}, r"scale: expected a number, got float32 \(2,\)"),
        ({"scale": np.ones(1)}, "scale: expected a number, got float64"),
        ({"scale": float("nan")}, "scale: expected a positive number"),
        ({"weight": np.ones(7, np.float32)}, "weight: expected shape"),
        ({"weight": np.ones(8, ml_dtypes.bfloat16)}, "weight: expected dtype float32 or float16"),
        ({"input": np.ones((2, 8), np.int32)}, "input: expected"),
        ({"eps": -1.0}, "eps: expected a number >= 0"),
    ):
        given = {"out": out, "input": x, "weight": weight, "scale": 1.0} | changes
        with pytest.raises(InvalidArgumentError, match=r"^\[rmsnorm_quant\] " + message):
            ops.rmsnorm_quant(**given)
    op = r"^\[fused_add_rmsnorm_quant\] "
    with pytest.raises(InvalidArgumentError, match=op + r"residual: expected float16 \(2, 8\)"):
        ops.fused_add_rmsnorm_quant(out, x, x[:1].copy(), weight, 1.0)
    frozen = x.copy()
    frozen.flags.writeable = False
    with pytest.raises(InvalidArgumentError, match=op + "residual: expected a writable"):
        ops.fused_add_rmsnorm_quant(out, x, frozen, weight, 1.0)
    with pytest.raises(InvalidArgumentError, match=r"^\[layernorm_quant\] beta: expected"):
        ops.layernorm_quant(out, x, weight, weight.astype(np.float64), 1.0)
    broadcast = np.broadcast_to(out[:1], (2, 8))
    with pytest.raises(InvalidArgumentError, match="out: expected a writable array"):
        ops.rmsnorm_quant(broadcast, x, weight, 1.0)


def angles(count, dim):
    angle = np.arange(count)[:, None] * 10000.0 ** (-np.arange(0, dim, 2) / dim)
    return np.concatenate([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)


def rotated(x, positions, neox):
    """Rotated rows, and the sizes that their float32 errors are relative to."""
    x = wide(x).reshape(len(positions), -1, x.shape[-1])
    half = x.shape[-1] // 2
    order = np.arange(2 * half) if neox else np.arange(2 * half).reshape(half, 2).T.reshape(-1)
    back = np.argsort(order)
    turned = rotate(x[..., order], positions, 1e4, 1.0)[..., back]
    first, second = x[..., order[:half]], x[..., order[half:]]
    size = np.abs(first) + np.abs(second)
    return turned, np.concatenate([size, size], axis=-1)[..., back]


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("latent", [False, True])
@every_dtype
@every_float8
def test_rope_quantize(isa, neox, latent, dtype, float8):
    tokens, heads, kv_heads, rope, nope = 13, 6, 1 if latent else 3, 32, 48
    q = random(8, tokens, heads, rope + nope, dtype=dtype)
    k = random(9, tokens, kv_heads, rope + nope, dtype=dtype)
    k = k[:, 0] if latent else k
    positions = np.random.default_rng(10).integers(0, 40, tokens)
    parts = (q[..., :rope], k[..., :rope], q[..., rope:], k[..., rope:])
    table = angles(40, rope)
    scales = {"quant_scale_q": 0.5, "quant_scale_kv": 40.0}
    # Results in slices of whole queries, as callers that pass them on have them.
    whole = np.zeros(q.shape, tag(float8))
    outs = {"q_rope_out": whole[..., :rope], "q_nope_out": whole[..., rope:]}
    operator = ops.mla_rope_quantize_fp8 if latent else ops.rope_quantize_fp8
    got = operator(*parts, table, positions, neox, tag(float8), **scales, **outs)
    assert got[0] is outs["q_rope_out"] and got[2] is outs["q_nope_out"]
    for part, out, scale in zip(parts, got, (0.5, 40.0) * 2, strict=True):
        assert out.shape == part.shape
        if out.shape[-1] == rope:
            expected, size = rotated(part, positions, neox)
            expected, size = (x.reshape(part.shape) * scale for x in (expected, size))
        else:
            expected = size = wide(part) * scale
        assert_nearest(out, expected, float8, terms=2, magnitude=np.abs(size))


def test_rope_of_torch_tensors():
    q, k = torch.randn(4, 2, 16).half(), torch.randn(4, 1, 16).half()
    table, places = torch.from_numpy(angles(9, 16)), torch.tensor([0, 3, 8, 1], dtype=torch.int32)
    got = ops.rope_quantize_fp8(q, k, None, None, table, places)
    assert all(x.dtype == torch.float8_e4m3fn for x in got)
    assert got[2].shape == (4, 2, 0) and got[3].shape == (4, 1, 0)
    expected = ops.apply_rope_with_cos_sin_cache(
        places, q.reshape(4, 32).float(), k.reshape(4, 16).float(), 16, table
    )
    for out, rows in zip(got, expected, strict=False):
        np.testing.assert_array_equal(out.double().reshape(4, -1), rows.to(out.dtype).double())
    inferred = ops.rope_quantize_fp8(q, k, None, None, table, places, k_rope_out=got[1])
    assert inferred[1] is got[1]
    narrow = ops.rope_quantize_fp8(q, k, None, None, table, places, True, torch.float8_e5m2)
    assert narrow[0].dtype == torch.float8_e5m2


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@every_dtype
@every_float8
def test_append(isa, layout, dtype, float8):
    """Ragged rows at the ends of their sequences; what else the pages hold stays."""
    rng = np.random.default_rng(11)
    rows, page_size, rope = [3, 0, 20, 1], 16, 32
    batch = Paged(rng, [5, 9, 40, 1], page_size, Shape(4, 2, 64), float8, layout)
    tokens = sum(rows)
    q, k, v = (random(seed, tokens, h, 64, dtype=dtype) for seed, h in ((12, 4), (13, 2), (14, 2)))
    places = ops.get_batch_indices_positions(offsets(rows), batch.kv_len, tokens)
    before = [x.copy() for x in batch.cache]
    got = ops.rope_quantize_fp8_append_paged_kv_cache(
        q[..., :rope], k[..., :rope], q[..., rope:], k[..., rope:], v, angles(40, rope), places[1],
        batch.cache, batch.kv_indices, batch.kv_indptr, *places, True, None, 2.0, 0.5, page_size,
        layout,
    )  # fmt: skip
    apart = ops.rope_quantize_fp8(
        q[..., :rope], k[..., :rope], q[..., rope:], k[..., rope:], angles(40, rope), places[1],
        True, tag(float8), 2.0, 0.5,
    )  # fmt: skip
    np.testing.assert_array_equal(got[0], apart[0])
    np.testing.assert_array_equal(got[1], apart[2])
    written = np.zeros(before[0].shape[:2] if layout == "NHD" else before[0].shape[::2][:2], bool)
    keys, values = (x if layout == "NHD" else x.swapaxes(1, 2) for x in batch.cache)
    for token, (s, position) in enumerate(zip(*places, strict=True)):
        page, slot = (int(x[position]) for x in batch.places(s))
        written[page, slot] = True
        np.testing.assert_array_equal(keys[page, slot, :, :rope], apart[1][token])
        np.testing.assert_array_equal(keys[page, slot, :, rope:], apart[3][token])
        assert_nearest(values[page, slot], wide(v[token]) * 0.5, float8)
    for old, new in zip(before, (keys, values), strict=True):
        old = old if layout == "NHD" else old.swapaxes(1, 2)
        np.testing.assert_array_equal(old.view(np.uint8)[~written], new.view(np.uint8)[~written])


@every_float8
def test_append_of_latent_attention(isa, float8):
    batch = Paged(np.random.default_rng(15), [5, 20], 16, Shape(1, 1, 48, 32), float8)
    caches = tuple(x[:, :, 0] for x in batch.cache)
    rows, tokens = [2, 20], 22
    q, k = random(16, tokens, 4, 80), random(17, tokens, 80)
    places = ops.get_batch_indices_positions(offsets(rows), batch.kv_len, tokens)
    lists = (batch.kv_indices, batch.kv_indptr, *places)
    table = angles(40, 32)
    parts = (q[..., :32], k[:, :32], q[..., 32:], k[:, 32:])
    ops.rope_quantize_fp8_append_paged_kv_cache(*parts, None, table, places[1], caches, *lists)
    apart = ops.mla_rope_quantize_fp8(*parts, table, places[1], True, tag(float8))
    for token, (s, position) in enumerate(zip(*places, strict=True)):
        page, slot = (int(x[position]) for x in batch.places(s))
        np.testing.assert_array_equal(caches[0][page, slot], apart[3][token])
        np.testing.assert_array_equal(caches[1][page, slot], apart[1][token])


def test_errors_of_rotations():
    q, k = np.ones((3, 4, 16), np.float16), np.ones((3, 2, 16), np.float16)
    given = {
        "q_rope": q,
        "k_rope": k,
        "q_nope": q,
        "k_nope": k,
        "cos_sin_cache": angles(5, 16),
        "pos_ids": np.arange(3),
    }
    for changes, message in (
        ({"q_rope": q[0]}, "q_rope: expected 3 dimensions"),
        ({"k_rope": k[None]}, "k_rope: expected 2 or 3 dimensions"),
        ({"q_nope": q[:2]}, r"q_nope: expected dimensions \(3, 4\) before its last"),
        ({"k_nope": k[:, 0]}, r"k_nope: expected dimensions \(3, 2\) before its last"),
        ({"cos_sin_cache": angles(5, 16).astype(np.float64)}, "cos_sin_cache: expected float32"),
        ({"cos_sin_cache": angles(5, 18)}, ""),
        ({"pos_ids": np.array([0, 1, 5])}, ""),
        ({"pos_ids": np.arange(2)}, ""),
        ({"quantize_dtype": "float16"}, "quantize_dtype: expected float8_e4m3fn or float8_e5m2"),
        ({"quant_scale_q": -1.0}, "quant_scale_q: expected a positive number"),
        ({"quant_scale_kv": 0.0}, "quant_scale_kv: expected a positive number"),
        ({"q_rope_out": np.empty((3, 4, 8), ops.float8_e5m2)}, r"q_rope_out: expected float8_e5m2"),
    ):
        with pytest.raises(InvalidArgumentError, match=r"^\[rope_quantize_fp8\] " + message):
            ops.rope_quantize_fp8(**(given | changes))
    op = r"^\[mla_rope_quantize_fp8\] "
    with pytest.raises(InvalidArgumentError, match=op + "k_rope: expected 2 dimensions"):
        ops.mla_rope_quantize_fp8(**given)
    cache = np.zeros((2, 2, 16, 2, 32), ops.float8_e4m3fn)
    append = given | {
        "v": np.ones((3, 2, 32), np.float16),
        "paged_kv_cache": cache,
        "kv_indices": np.arange(2, dtype=np.int32),
        "kv_indptr": np.array([0, 2], np.int32),
        "batch_indices": np.zeros(3, np.int32),
        "positions": np.arange(3, dtype=np.int32),
    }
    ops.rope_quantize_fp8_append_paged_kv_cache(**append)
    op = r"^\[rope_quantize_fp8_append_paged_kv_cache\] "
    for changes, message in (
        ({"v": None}, "v: expected None with k_rope"),
        ({"paged_kv_cache": cache.view(np.uint8)}, "quantize_dtype: expected float8_e4m3fn or"),
        ({"quantize_dtype": "float8_e5m2"}, "paged_kv_cache: expected float8_e5m2"),
        ({"page_size": 8}, "page_size: expected 16, of the cache, got 8"),
        ({"kv_layout": "DHN"}, "kv_layout: expected NHD or HND"),
        ({"positions": np.array([0, 1, 32], np.int32)}, r"positions\[2\]: expected"),
        ({"batch_indices": np.array([0, 0, 1], np.int32)}, r"batch_indices\[2\]: expected"),
        ({"v": np.ones((3, 2, 16), np.float16)}, "append_value: expected shape"),
    ):
        with pytest.raises(InvalidArgumentError, match=op + message):
            ops.rope_quantize_fp8_append_paged_kv_cache(**(append | changes))

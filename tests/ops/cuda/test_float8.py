"""Norms and rotations that end in 8-bit floats on a GPU, against float64 and the CPU's bits."""

import ml_dtypes
import numpy as np
import pytest

from effinfer import InvalidArgumentError, Queue, _core, ops
from tests.ops.batches import Paged, Shape, offsets
from tests.ops.cuda.gpu_arrays import here, there
from tests.ops.rows import DTYPES, random
from tests.ops.test_float8 import LARGEST, angles, assert_nearest, rms, rotated, tag, wide

every_dtype = pytest.mark.parametrize("dtype", list(DTYPES))
every_float8 = pytest.mark.parametrize("float8", list(LARGEST))
every_shape = pytest.mark.parametrize("shape", [(1, 1), (5, 33), (3, 2, 64), (0, 16)])


def empty(shape, float8):
    return there(np.zeros(shape, tag(float8)))


@every_float8
def test_conversions_have_the_bits_of_the_cpu(float8):
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((9, 41)) * 2.0 ** rng.integers(-20, 18, (9, 41))).astype("f4")
    x[0, :4] = np.inf, -np.inf, np.nan, -0.0
    for cols, first in ((41, 0), (40, 0), (8, 1)):
        part = x[:, first : first + cols]
        for to in (float8, "float16", "bfloat16", "float32"):
            dtype = getattr(ml_dtypes, to, None) or np.dtype(to)
            expected, out = np.zeros(part.shape, dtype), there(np.zeros(part.shape, dtype))
            _core.convert_rows(part, expected, 0.7)
            _core.convert_rows(there(x)[:, first : first + cols], out, 0.7, pool=queue())
            same(here(out), expected)
            back, wanted = there(np.zeros(part.shape, "f4")), np.zeros(part.shape, "f4")
            _core.convert_rows(out, back, 1.5, pool=queue())
            _core.convert_rows(expected, wanted, 1.5)
            np.testing.assert_array_equal(here(back), wanted)


def queue():
    return Queue("cuda:0", 0)


def same(actual, expected):
    nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(actual.astype(np.float32)), nan)
    bits = np.dtype(f"u{expected.itemsize}")
    np.testing.assert_array_equal(actual.view(bits)[~nan], expected.view(bits)[~nan])


@every_dtype
@every_float8
@every_shape
def test_norms(shape, dtype, float8):
    x, residual = random(0, *shape, dtype=dtype), random(1, *shape, dtype=dtype)
    weight, beta = random(2, shape[-1], dtype=dtype), random(3, shape[-1])
    out, terms = empty(shape, float8), {"terms": shape[-1]}
    assert ops.rmsnorm_quant(out, there(x), there(weight), 0.02, 1e-5) is None
    assert_nearest(here(out), rms(x, weight, 1e-5) / 0.02, float8, **terms)
    scale = there(np.array([0.5], np.float32))
    rows, sums = there(x), there(residual)
    ops.fused_add_rmsnorm_quant(out, rows, sums, there(weight), scale)
    total = rms(wide(x) + wide(residual), weight) / 0.5
    assert_nearest(here(out), total, float8, magnitude=np.abs(total) * 2, **terms)
    np.testing.assert_array_equal(here(rows), x)
    wanted = there(residual)
    ops.fused_add_rmsnorm(there(x), wanted, there(weight))
    np.testing.assert_array_equal(here(sums), here(wanted))
    ops.layernorm_quant(out, there(x), there(weight), there(beta), 0.25)
    centred = wide(x) - wide(x).mean(axis=-1, keepdims=True)
    deviation = np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + 1e-6)
    expected = (centred / deviation * wide(weight) + wide(beta)) / 0.25
    size = np.abs(wide(x)) / deviation * np.abs(wide(weight)) + np.abs(wide(beta))
    assert_nearest(here(out), expected, float8, magnitude=size / 0.25, **terms)


def test_results_may_be_slices():
    x, whole = random(4, 6, 24), there(np.zeros((6, 2, 24), tag("float8_e4m3fn")))
    ops.rmsnorm_quant(whole[:, 1], there(x), there(np.ones(24, np.float32)), 0.1)
    bits = here(whole).view(np.uint8)
    assert not bits[:, 0].any()
    alone = empty((6, 24), "float8_e4m3fn")
    ops.rmsnorm_quant(alone, there(x), there(np.ones(24, np.float32)), 0.1)
    np.testing.assert_array_equal(bits[:, 1], here(alone).view(np.uint8))


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("latent", [False, True])
@every_dtype
def test_rope_quantize(neox, latent, dtype):
    float8 = "float8_e4m3fn" if neox else "float8_e5m2"
    tokens, rope, nope = 7, 32, 40
    q = random(8, tokens, 3, rope + nope, dtype=dtype)
    k = random(9, tokens, 1 if latent else 2, rope + nope, dtype=dtype)
    k = k[:, 0] if latent else k
    positions = np.random.default_rng(10).integers(0, 40, tokens)
    parts = (q[..., :rope], k[..., :rope], q[..., rope:], k[..., rope:])
    q_there, k_there = there(q), there(k)
    given = (q_there[..., :rope], k_there[..., :rope], q_there[..., rope:], k_there[..., rope:])
    whole = empty(q.shape, float8)
    outs = {"q_rope_out": whole[..., :rope], "q_nope_out": whole[..., rope:]}
    operator = ops.mla_rope_quantize_fp8 if latent else ops.rope_quantize_fp8
    scales = {"quant_scale_q": 0.5, "quant_scale_kv": 40.0}
    got = operator(*given, there(angles(40, rope)), there(positions), neox, **scales, **outs)
    assert got[0] is outs["q_rope_out"] and got[2] is outs["q_nope_out"]
    for part, out, scale in zip(parts, got, (0.5, 40.0) * 2, strict=True):
        if out.shape[-1] == rope:
            expected, size = rotated(part, positions, neox)
            expected, size = (x.reshape(part.shape) * scale for x in (expected, size))
        else:
            expected = size = wide(part) * scale
        assert_nearest(here(out), expected, float8, terms=2, magnitude=np.abs(size))
    alone = ops.rope_quantize_fp8(
        *given[:2], None, None, there(angles(40, rope)), there(positions), neox, tag(float8)
    )
    assert alone[2].shape == (tokens, 3, 0) and here(alone[0]).dtype == getattr(ml_dtypes, float8)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_append(layout):
    rng = np.random.default_rng(11)
    float8, rows, page_size, rope, tokens = "float8_e4m3fn", [3, 0, 20, 1], 16, 32, 24
    batch = Paged(rng, [5, 9, 40, 1], page_size, Shape(4, 2, 64), float8, layout)
    q, k, v = (random(seed, tokens, h, 64) for seed, h in ((12, 4), (13, 2), (14, 2)))
    places = ops.get_batch_indices_positions(offsets(rows), batch.kv_len, tokens)
    caches = tuple(there(x) for x in batch.cache)
    before = [here(x).view(np.uint8).copy() for x in caches]
    parts = [there(x)[..., part] for part in (slice(rope), slice(rope, None)) for x in (q, k)]
    table = there(angles(40, rope)), there(places[1])
    got = ops.rope_quantize_fp8_append_paged_kv_cache(
        *parts, there(v), *table, caches, there(batch.kv_indices), there(batch.kv_indptr),
        *(there(x) for x in places), True, None, 2.0, 0.5, page_size, layout,
    )  # fmt: skip
    apart = ops.rope_quantize_fp8(*parts, *table, True, tag(float8), 2.0, 0.5)
    np.testing.assert_array_equal(here(got[0]), here(apart[0]))
    np.testing.assert_array_equal(here(got[1]), here(apart[2]))
    values = np.zeros(v.shape, tag(float8))
    _core.convert_rows(v, values, 0.5)
    wanted = np.concatenate([here(apart[1]), here(apart[3])], axis=-1), values
    for cache, first, new in zip(caches, before, wanted, strict=True):
        expected = first if layout == "NHD" else first.swapaxes(1, 2)
        for token, (s, position) in enumerate(zip(*places, strict=True)):
            page, slot = (int(x[position]) for x in batch.places(s))
            expected[page, slot] = new.view(np.uint8)[token]
        np.testing.assert_array_equal(here(cache).view(np.uint8), first)


def test_latent_append():
    """Keys without heads go to pages of the compressed and the rotated part."""
    caches = [empty((3, 4, dim), "float8_e5m2") for dim in (48, 16)]
    q, k = random(15, 5, 2, 16), random(16, 5, 64)
    k_there = there(k)
    places = np.array([0, 0, 1, 1, 1], np.int32), np.array([2, 3, 0, 1, 2], np.int32)
    at = [there(x) for x in places]
    ops.rope_quantize_fp8_append_paged_kv_cache(
        there(q), k_there[:, 48:], None, k_there[:, :48], None, there(angles(9, 16)), at[1],
        tuple(caches), there(np.array([2, 0], np.int32)), there(np.array([0, 1, 2], np.int32)), *at,
        page_size=4,
    )  # fmt: skip
    nope = np.zeros((5, 48), tag("float8_e5m2"))
    _core.convert_rows(np.ascontiguousarray(k[:, :48]), nope)
    stored = here(caches[0]).view(np.uint8)
    pages = np.array([2, 2, 0, 0, 0])
    np.testing.assert_array_equal(stored[pages, places[1]], nope.view(np.uint8))
    assert not stored[1].any() and not stored[2, :2].any()
    assert_nearest(
        here(caches[1])[pages, places[1]], *flat(rotated(k[:, 48:], places[1], True)), terms=2
    )


def flat(pair):
    expected, size = (x.reshape(5, 16) for x in pair)
    return expected, "float8_e5m2"


def test_errors():
    x, weight = there(np.ones((2, 8), np.float16)), there(np.ones(8, np.float32))
    out = empty((2, 8), "float8_e4m3fn")
    for changes, message in (
        ({"out": x}, "out: expected float8_e4m3fn or float8_e5m2"),
        ({"out": out[:1]}, r"out: expected float8_e4m3fn \(2, 8\)"),
        ({"scale": there(np.ones(2, np.float32))}, r"scale: expected a number, got float32 \(2,\)"),
        ({"weight": np.ones(8, np.float32)}, "weight: expected a tensor on cuda:0, got one on cpu"),
        ({"weight": there(np.ones(7, np.float32))}, "weight: expected shape"),
        ({"eps": -1.0}, "eps: expected a number >= 0"),
    ):
        given = {"out": out, "input": x, "weight": weight, "scale": 1.0} | changes
        with pytest.raises(InvalidArgumentError, match=r"^\[rmsnorm_quant\] " + message):
            ops.rmsnorm_quant(**given)

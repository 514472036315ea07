"""Lists whose keys are drawn and weighted: attention over weights, which keys collide and how often
they count, and that attention's sums have the expectation of those over all keys, in float64."""

import math

import numpy as np
import pytest

from effinfer import _core
from tests.ops.attention_reference import PAGE, Batch, fill, make_batch, reference
from tests.ops.test_attention import bf16_arithmetic, to_bf16
from tests.ops.visit_lists import CHOOSING, SHAPES, random_words, row_visits, unpack, visited
from tests.tolerance import BF16_EPS, assert_close

KV_LENS = [1, 63, 200, 1030, 900, 130]
QO_LENS = [1, 2, 1, 63, 1, 65]  # the last one is a prompt's
GENERATED = len(KV_LENS) - 1
OPTIONS = [
    ("f32", {"bits": 4, "tables": 8, "sink_tokens": 64, "seed": 1 << 40}),
    ("bf16", {"bits": 3, "tables": 16, "sink_tokens": 5, "local_tokens": 200}),
    ("f16", {"bits": 8, "tables": 40, "seed": 3}),
    ("i8", {"bits": 1, "tables": 8, "min_tokens": 1000, "sink_tokens": 130}),
]


def weights_of(visits, batch: Batch, kv_heads: int) -> list[np.ndarray]:
    """[kv_heads, rows, kv_len] of each sequence."""
    found = [
        np.zeros((kv_heads, batch.rows(s).stop - batch.rows(s).start, length))
        for s, length in enumerate(batch.kv_len)
    ]
    for (sequence, first, rows, _), weights in zip(visits.blocks, visits.log_weights, strict=True):
        begin = first - batch.qo_indptr[sequence]
        found[sequence][:, begin : begin + rows] = weights[:, None, : batch.kv_len[sequence]]
    return found


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "i8"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_attention_adds_the_weights_of_lists(isa, dtype, heads, kv_heads, head_dim):
    rng = np.random.default_rng(head_dim)
    batch = make_batch(rng, KV_LENS, QO_LENS)
    kv, keys, values = fill(rng, batch, kv_heads, head_dim, dtype)
    q = rng.standard_normal((sum(QO_LENS), heads, head_dim), np.float32)
    visits = row_visits(batch, heads, kv_heads, weighted=True)
    visits.words[:] = random_words(rng, visits.words.shape)
    assert not visits.log_weights.any()
    # What is not visited may be anything.
    shape = visits.log_weights.shape
    bits = unpack(visits.words, shape[-1])
    visits.log_weights[:] = np.where(bits, rng.uniform(-2, 4, shape), np.nan)
    lists = visited(visits, batch, kv_heads)
    added = [
        np.where(seen, weights, 0.0)
        for seen, weights in zip(lists, weights_of(visits, batch, kv_heads), strict=True)
    ]
    scale = np.float32(head_dim**-0.5)
    out = _core.paged_attention(q, kv, *batch.lists, sm_scale=scale, visits=visits)
    expected, magnitude = reference(q, keys, values, batch, scale, visited=lists, added=added)
    assert_close(out, expected, terms=head_dim + max(KV_LENS), magnitude=magnitude)
    if dtype == "bf16" and bf16_arithmetic():
        out = _core.paged_attention(
            q, kv, *batch.lists, sm_scale=scale, arithmetic="bf16", visits=visits
        )
        expected, magnitude = reference(
            to_bf16(q * scale),
            keys,
            values,
            batch,
            1.0,
            visited=lists,
            added=added,
            of_probabilities=True,
        )
        assert_close(out, expected, magnitude=magnitude, eps=BF16_EPS / 2)


def test_weights_of_once_are_none(isa):
    rng = np.random.default_rng(3)
    batch = make_batch(rng, KV_LENS, QO_LENS)
    kv, _, _ = fill(rng, batch, 3, 64, "bf16")
    q = rng.standard_normal((sum(QO_LENS), 9, 64), np.float32)
    visits = row_visits(batch, 9, 3, weighted=True)
    plain = row_visits(batch, 9, 3)
    assert plain.log_weights is None
    plain.words[:] = visits.words[:] = random_words(rng, plain.words.shape)
    expected = _core.paged_attention(q, kv, *batch.lists, visits=plain)
    np.testing.assert_array_equal(
        _core.paged_attention(q, kv, *batch.lists, visits=visits), expected
    )


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox4x32-10 (Salmon et al., SC 2011) of counters [n, 4]: the first two words, uint64."""
    x = counter.astype(np.uint64).T
    low = np.uint64(0xFFFFFFFF)
    k0, k1 = key
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * x[0], np.uint64(0xCD9E8D57) * x[2]
        shift = np.uint64(32)
        x = np.array(
            [
                (b >> shift) ^ x[1] ^ np.uint64(k0),
                b & low,
                (a >> shift) ^ x[3] ^ np.uint64(k1),
                a & low,
            ]
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return x[:2].T


def planes_of(group: int, tables: int, bits: int, head_dim: int, seed: int) -> np.ndarray:
    """Normals by Box and Muller, float64 [group, tables, bits, head_dim]."""
    count = group * tables * bits * head_dim
    counters = np.zeros((count, 4), np.uint64)
    counters[:, 0] = np.arange(count)
    words = philox(counters, (seed & 0xFFFFFFFF, seed >> 32))
    uniform = ((words[:, 0] << np.uint64(32) | words[:, 1]) >> np.uint64(11)).astype(
        float
    ) * 2.0**-53
    radius, angle = np.sqrt(-2 * np.log(1 - uniform[0::2])), 2 * np.pi * uniform[1::2]
    normals = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).ravel()
    return (
        normals.reshape(group, tables // 8, bits, 8, head_dim)
        .transpose(0, 1, 3, 2, 4)
        .reshape(group, tables, bits, head_dim)
    )


def chance(cosines: np.ndarray, tables: int, bits: int) -> np.ndarray:
    """That two tables or more collide."""
    agree = 1 - np.arccos(np.clip(cosines, -1, 1)) / np.pi
    x = agree**bits
    terms = [math.comb(tables, n) * x**n * (1 - x) ** (tables - n) for n in range(2, tables + 1)]
    return np.sum(terms, axis=0)


def check_row(bits, weights, row, q, keys, mean, options) -> int:
    """One list [kv_len] of q [group, dim]; how many keys were drawn, -1 where all are visited."""
    position, own = row[3], row[3] // PAGE
    sinks, local = options.get("sink_tokens", 0), options.get("local_tokens", 0)
    behind_local = -(-max(0, position + 1 - local) // PAGE) if local else own
    first, end = sinks // PAGE, min(own - 1, behind_local)
    if position + 1 < options.get("min_tokens", 0) or end <= first:
        assert bits[: position + 1].all()
        return -1
    always = np.zeros(position + 1, bool)
    always[:sinks] = True
    always[max(0, position + 1 - local) if local else position :] = True
    always[(own - 1) * PAGE :] = True
    assert bits[: position + 1][always].all()
    assert not weights[: position + 1][always].any()
    between = slice(first * PAGE, end * PAGE)
    tables, bits_of = options["tables"], options["bits"]
    planes = planes_of(len(q), tables, bits_of, q.shape[1], options.get("seed", 0))
    centred = keys[between].astype(np.float64) - mean
    q = q.astype(np.float64)
    sides_k = np.einsum("htbd,kd->htbk", planes, centred)
    sides_q = np.einsum("htbd,hd->htb", planes, q)[..., None]
    # What roundings to float32 may move.
    error = 2.0**-23 * (q.shape[1] + 4)
    unsure = abs(sides_k) < error * np.einsum("htbd,kd->htbk", abs(planes), abs(centred))
    unsure |= abs(sides_q) < error * np.einsum("htbd,hd->htb", abs(planes), abs(q))[..., None]
    agree = (sides_k > 0) == (sides_q > 0)
    collides = {
        sure: ((agree & ~unsure if sure else agree | unsure).all(2).sum(1) >= 2).any(0)
        for sure in (True, False)
    }
    free = ~always[between]
    drawn = bits[between]
    assert drawn[free & collides[True]].all()
    assert not drawn[free & ~collides[False]].any()
    sizes = np.linalg.norm(q, axis=1)[:, None] * np.linalg.norm(centred, axis=1)
    chances = chance(q @ centred.T / sizes, tables, bits_of)
    expected = -np.log(1 - np.prod(1 - chances, axis=0))
    some = drawn & free
    # Products of float32, and a line between two steps of the cosine.
    np.testing.assert_allclose(weights[between][some], expected[some], atol=2e-4)
    return int(some.sum())


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), CHOOSING)
@pytest.mark.parametrize(("dtype", "options"), OPTIONS)
def test_keys_that_collide(isa, dtype, options, heads, kv_heads, head_dim):
    rng = np.random.default_rng(heads)
    batch = make_batch(rng, KV_LENS, QO_LENS)
    kv, keys, _ = fill(rng, batch, kv_heads, head_dim, dtype)
    q = rng.standard_normal((sum(QO_LENS), heads, head_dim), np.float32)
    means = rng.standard_normal((kv_heads, head_dim), np.float32)
    visits = row_visits(batch, heads, kv_heads, weighted=True)
    visits.words[:] = random_words(rng, visits.words.shape)
    visits.log_weights[:] = np.nan
    before = visits.words.copy()
    _core.hash_visits(visits, q, kv, *batch.lists, means=means, **options)
    np.testing.assert_array_equal(visits.words[:2], before[:2])  # those of the prompt's blocks
    drawn = []
    grouped = q.reshape(len(q), kv_heads, -1, head_dim)
    for row, words, weights in zip(
        visits.blocks[2:], visits.words[2:], visits.log_weights[2:], strict=True
    ):
        if row[0] == 3 and row[3] % 7:
            continue  # of many rows, every seventh
        for head in range(kv_heads):
            bits = unpack(words[head], int(batch.kv_len[row[0]]))
            of_head = keys[row[0]][:, head]
            drawn.append(
                check_row(
                    bits, weights[head], row, grouped[row[1], head], of_head, means[head], options
                )
            )
    assert max(drawn) > 0
    assert -1 in drawn


def test_rows_that_visit_all_have_no_weights(isa):
    rng = np.random.default_rng(4)
    batch = make_batch(rng, [900], [1])
    kv, _, _ = fill(rng, batch, 1, 32, "f32")
    q = rng.standard_normal((1, 2, 32), np.float32)
    visits = row_visits(batch, 2, 1, weighted=True)
    visits.log_weights[:] = np.nan
    _core.hash_visits(visits, q, kv, *batch.lists, min_tokens=901)
    out = _core.paged_attention(q, kv, *batch.lists, visits=visits)
    np.testing.assert_array_equal(out, _core.paged_attention(q, kv, *batch.lists))


def test_a_row_draws_alike_alone_and_behind_others(isa):
    rng = np.random.default_rng(5)
    batch = make_batch(rng, [700, 1500], [60, 63])
    kv, _, _ = fill(rng, batch, 2, 64, "bf16")
    q = rng.standard_normal((123, 6, 64), np.float32)
    visits = row_visits(batch, 6, 2, weighted=True)
    options = {"bits": 3, "tables": 8, "sink_tokens": 64}
    _core.hash_visits(visits, q, kv, *batch.lists, **options)
    for row, words, weights in zip(visits.blocks, visits.words, visits.log_weights, strict=True):
        sequence, first, _, position = map(int, row)
        part = batch.part(sequence, position, position + 1)
        alone = row_visits(part, 6, 2, weighted=True)
        _core.hash_visits(alone, q[first : first + 1], kv, *part.lists, **options)
        size = position // PAGE + 1
        np.testing.assert_array_equal(alone.words[0, :, :size], words[:, :size])
        bits = unpack(words, position + 1)
        np.testing.assert_array_equal(
            alone.log_weights[0, :, : position + 1][bits], weights[:, : position + 1][bits]
        )


def test_sums_have_the_expectation_of_those_over_all_keys():
    """Over 400 seeds, of each query head. A mean of n independent draws has the standard error s /
    sqrt(n), and is within five of them of the expectation but once in 10^6 times, as s is that of
    the draws."""
    rng = np.random.default_rng(6)
    length, seeds, group, dim = 600, 400, 3, 32
    batch = make_batch(rng, [length], [1])
    kv, keys, values = fill(rng, batch, 1, dim, "f32")
    q = rng.standard_normal((1, group, dim), np.float32)
    k, v = (each[0][:, 0].astype(np.float64) for each in (keys, values))
    means = k.mean(0, keepdims=True).astype(np.float32)
    terms = np.exp(q[0].astype(np.float64) @ k.T * dim**-0.5)  # [group, length]
    visits = row_visits(batch, group, 1, weighted=True)
    sums = np.empty((seeds, group, dim + 1))
    counts = np.zeros(length)
    for seed in range(seeds):
        _core.hash_visits(
            visits, q, kv, *batch.lists, bits=4, tables=8, seed=seed, means=means, sink_tokens=64
        )
        bits = unpack(visits.words[0, 0], length)
        weighted = np.where(bits, np.exp(visits.log_weights[0, 0, :length], dtype=float), 0.0)
        sums[seed, :, :dim] = (terms * weighted) @ v
        sums[seed, :, dim] = terms @ weighted
        counts += weighted
    expected = np.concatenate([terms @ v, terms.sum(1, keepdims=True)], axis=1)
    error = sums.std(0) / np.sqrt(seeds)
    assert (error < 0.05 * terms.sum(1, keepdims=True)).all()  # it could fail
    assert (abs(sums.mean(0) - expected) < 5 * error).all()
    # Of single keys, too: each counts once on average.
    assert abs(counts.mean() / seeds - 1) < 0.05
    drawn = unpack(visits.words[0, 0], length).mean()
    assert drawn < 0.6


def test_numbers_that_are_none_do_no_harm(isa):
    rng = np.random.default_rng(7)
    batch = make_batch(rng, [900], [1])
    kv, _, _ = fill(rng, batch, 1, 16, "f32")
    visits = row_visits(batch, 2, 1, weighted=True)
    for value in (np.nan, np.inf, 0.0):
        q = np.full((1, 2, 16), value, np.float32)
        _core.hash_visits(visits, q, kv, *batch.lists, bits=1, tables=8)
        out = _core.paged_attention(q, kv, *batch.lists, visits=visits)
        assert np.isfinite(out).all() == (value == 0.0)


def test_refused():
    rng = np.random.default_rng(6)
    batch = make_batch(rng, [300], [1])
    kv, _, _ = fill(rng, batch, 1, 16, "f32")
    q = rng.standard_normal((1, 2, 16), np.float32)
    visits = row_visits(batch, 2, 1, weighted=True)
    error = _core.InvalidArgumentError
    wrong = {
        "bits": (0, 9),
        "tables": (0, 12, 264),
        "sink_tokens": (-1,),
        "local_tokens": (-1,),
        "min_tokens": (-1,),
        "means": (np.zeros((2, 16), np.float32), np.full((1, 16), np.nan, np.float32)),
    }
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(error, match=rf"\[hash_visits\] {name}"):
                _core.hash_visits(visits, q, kv, *batch.lists, **{name: value})
    plain = row_visits(batch, 2, 1)
    with pytest.raises(error, match=r"\[hash_visits\] visits: expected lists with weights"):
        _core.hash_visits(plain, q, kv, *batch.lists)
    with pytest.raises(error, match=r"\[hash_visits\] visits: expected lists of this batch"):
        _core.hash_visits(row_visits(batch, 3, 1, weighted=True), q, kv, *batch.lists)

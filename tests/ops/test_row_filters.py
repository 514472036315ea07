"""Softmax, renormalised and masked rows, and top-k, against sorting in float64."""

import numpy as np
import pytest

from effinfer import _core, ops, testing
from tests.ops import row_reference as reference

VOCABS = [1, 2, 15, 16, 17, 255, 1000, 1025, 33_333]
EPS = np.finfo(np.float32).eps


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def adversarial(vocab):
    """Rows of logits that are hard to select from."""
    rng = np.random.default_rng(vocab)
    ties = rng.integers(0, 3, vocab).astype(np.float32)
    one_hot = np.full(vocab, -np.inf, np.float32)
    one_hot[vocab // 2] = -7.0
    spike = np.zeros(vocab, np.float32)
    spike[-1] = 9.0
    descending = -np.linspace(0, 20, vocab, dtype=np.float32)
    halves = np.where(np.arange(vocab) % 2 == 0, -np.inf, random(1, vocab)).astype(np.float32)
    halves[-1] = 0.0
    signed_zeros = np.where(np.arange(vocab) % 2 == 0, -0.0, 0.0).astype(np.float32)
    huge = random(2, vocab) * np.float32(1e30)
    scales = random(3, vocab) * np.exp(10 * random(4, vocab))
    flat = 5 + 1e-4 * random(5, vocab)
    return np.stack([
        np.zeros(vocab, np.float32), ties, one_hot, spike, descending, descending[::-1], halves,
        signed_zeros, huge, scales, flat, random(6, vocab) * 4,
    ])  # fmt: skip


def ks_of(vocab):
    return sorted({1, min(2, vocab), min(50, vocab), max(1, vocab // 3), vocab, vocab + 5})


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("temperature", [None, 0.3, 2.5])
def test_softmax(isa, vocab, temperature):
    for logits in (adversarial(vocab), random(7, 3, vocab) * 10):
        probs = ops.softmax(logits, temperature)
        expected = reference.softmax(logits, temperature or 1.0)
        # x - max and its quotient are rounded: an error relative to their size, in the exponent.
        with np.errstate(invalid="ignore"):
            range_ = np.abs(logits - logits.max(-1, keepdims=True)) / (temperature or 1.0)
        allowed = expected * EPS * (8 + 2 * np.minimum(range_, 90)) + 1e-37
        assert (np.abs(probs - expected) <= allowed).all()


@pytest.mark.parametrize("vocab", VOCABS)
def test_top_k_is_exact(isa, vocab):
    logits = adversarial(vocab)
    for k in ks_of(vocab):
        masked = ops.top_k_mask_logits(logits, k)
        for row, got in zip(logits, masked, strict=True):
            expected = np.full(vocab, -np.inf, np.float32)
            kept = reference.order(row)[:k]
            expected[kept] = row[kept]
            np.testing.assert_array_equal(got, expected)
        if k > vocab:
            continue
        values, ids = ops.top_k(logits, k, sorted=True)
        ranked = np.stack([reference.order(row)[:k] for row in logits])
        np.testing.assert_array_equal(ids, ranked)
        np.testing.assert_array_equal(values, np.take_along_axis(logits, ids, 1))
        values, ids = ops.top_k(logits, k)
        assert ids.dtype == np.int64
        np.testing.assert_array_equal(ids, np.sort(ranked, 1))
        np.testing.assert_array_equal(values, np.take_along_axis(logits, ids, 1))


@pytest.mark.parametrize("vocab", VOCABS)
def test_top_k_renorm(isa, vocab):
    probs = reference.softmax(adversarial(vocab)[:8]).astype(np.float32)
    for k in ks_of(vocab):
        got = ops.top_k_renorm_probs(probs, k)
        expected = np.stack([reference.top_k(row.astype(np.float64), k) for row in probs])
        np.testing.assert_array_equal(got > 0, expected > 0)
        np.testing.assert_allclose(got, expected, rtol=16 * EPS, atol=1e-37)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("mass", [1e-6, 0.1, 0.5, 0.95, 0.9999, 1.0])
def test_top_p_renorm(isa, vocab, mass):
    probs = reference.softmax(adversarial(vocab)).astype(np.float32)
    got = ops.top_p_renorm_probs(probs, mass)
    for row, kept in zip(probs.astype(np.float64), got, strict=True):
        head = kept > 0
        size = int(head.sum())
        assert np.isclose(kept.sum(dtype=np.float64), 1.0, rtol=16 * EPS)
        # A head of the order, ties by id.
        ranked = reference.order(row)
        assert head[ranked[:size]].all()
        # The smallest with that mass, but for the rounding of the row's sum.
        sums = np.cumsum(row[ranked])
        slack = 8 * EPS * sums[-1]
        goal = np.float32(mass) * sums[-1]
        assert sums[size - 1] >= goal - slack
        assert size == 1 or sums[size - 2] < goal + slack
        np.testing.assert_allclose(kept[head], row[head] / sums[size - 1], rtol=16 * EPS)


@pytest.mark.parametrize("scale", [1e-4, 3.0])
def test_a_full_vocabulary(isa, scale):
    logits = random(11, 2, 131_072) * np.float32(scale)
    probs = ops.softmax(logits)
    assert np.abs(probs - reference.softmax(logits)).max() <= 16 * EPS * probs.max()
    for mass in (0.5, 0.95):
        got = ops.top_p_renorm_probs(probs, mass)
        expected = np.stack([reference.top_p(row.astype(np.float64), mass) for row in probs])
        # Where the sum's rounding decides, a few tokens of equal weight.
        assert ((got > 0) != (expected > 0)).sum() <= 4
        assert np.abs(got - expected).max() <= 2e-6 * probs.max() / mass + 4 * EPS
    ids = ops.top_k(logits, 1000, sorted=True)[1]
    np.testing.assert_array_equal(ids, np.stack([reference.order(row)[:1000] for row in logits]))


def test_parameters_of_rows(isa):
    probs = reference.softmax(random(12, 5, 100) * 2).astype(np.float32)
    ks = np.array([1, 7, 100, 3, 200], np.int32)
    got = ops.top_k_renorm_probs(probs, ks)
    np.testing.assert_array_equal((got > 0).sum(1), np.minimum(ks, 100))
    masses = np.array([0.1, 0.5, 1.0, 0.9, 0.3], np.float32)
    got = ops.top_p_renorm_probs(probs, masses)
    for i, mass in enumerate(masses):
        np.testing.assert_array_equal(got[i], ops.top_p_renorm_probs(probs[i : i + 1], mass)[0])
    warm = ops.softmax(probs, np.array([0.5, 1, 2, 3, 4]))
    np.testing.assert_array_equal(warm[3:4], ops.softmax(probs[3:4], 3.0))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_halves(isa, dtype):
    logits = (random(13, 4, 777) * 4).astype(dtype)
    probs = ops.softmax(logits)
    assert probs.dtype == np.float32
    np.testing.assert_array_equal(probs, ops.softmax(logits.astype(np.float32)))
    masked = ops.top_k_mask_logits(logits, 9)
    assert masked.dtype == dtype
    np.testing.assert_array_equal(np.isfinite(masked).sum(1), 9)
    half = probs.astype(dtype)
    got = ops.top_p_renorm_probs(half, 0.9)
    wide = ops.top_p_renorm_probs(half.astype(np.float32), 0.9)
    np.testing.assert_array_equal(got, wide.astype(dtype))
    values, ids = ops.top_k(logits, 5, sorted=True)
    assert values.dtype == dtype
    np.testing.assert_array_equal(values, np.take_along_axis(logits, ids, 1))


def test_bfloat16_keeps_its_kind(isa):
    logits = random(14, 3, 500).view(np.uint32) >> 16
    bits = logits.astype(np.uint16)
    wide = (bits.astype(np.uint32) << 16).view(np.float32)
    tagged = bits.view(ops.bfloat16)
    np.testing.assert_array_equal(ops.softmax(tagged), ops.softmax(wide))
    masked = np.asarray(ops.top_k_mask_logits(tagged, 5)).view(np.uint16)
    expected = ops.top_k_mask_logits(wide, 5)
    np.testing.assert_array_equal((masked.astype(np.uint32) << 16).view(np.float32), expected)


def test_same_bits_at_every_isa_level_in_any_batch_and_team():
    logits = np.concatenate([adversarial(3001), random(15, 9, 3001) * 3])
    probs = reference.softmax(logits).astype(np.float32)

    def results(pool, rows):
        return np.stack([
            ops.softmax(logits[rows], 0.7, pool=pool),
            ops.top_p_renorm_probs(probs[rows], 0.8, pool=pool),
            ops.top_k_renorm_probs(probs[rows], 77, pool=pool),
        ])  # fmt: skip

    expected = results(None, slice(None))
    for level in testing.available_isas():
        with testing.isa(level):
            for threads in (1, 3):
                pool = _core.ThreadPool(threads, oversubscribe=True)
                np.testing.assert_array_equal(results(pool, slice(None)), expected)
                np.testing.assert_array_equal(results(pool, slice(4, 5)), expected[:, 4:5])


def test_no_rows():
    empty = np.zeros((0, 10), np.float32)
    assert ops.softmax(empty).shape == (0, 10)
    assert ops.sampling_from_probs(empty, seed=1).shape == (0,)
    assert ops.top_k(empty, 3)[1].shape == (0, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ops.softmax(x, 0.0), r"\[softmax\] temperature: expected a positive number"),
        (lambda x: ops.softmax(x, np.ones(5)), r"temperature: expected a scalar or shape \[2\]"),
        (lambda x: ops.softmax(x[0]), r"\[softmax\] logits: expected 2 dimensions"),
        (lambda x: ops.softmax(x[:, :0]), "logits: expected at least one token"),
        (lambda x: ops.softmax(x.astype(np.int32)), "logits: expected float32, float16 or bfl"),
        (lambda x: ops.softmax(x, "warm"), r"\[softmax\] temperature: expected"),
        (lambda x: ops.top_k_renorm_probs(x, 0), r"\[top_k_renorm_probs\] top_k: expected at le"),
        (
            lambda x: ops.top_k_mask_logits(x, np.ones((1, 1), int)),
            r"\[top_k_mask_logits\] top_k: expected",
        ),
        (lambda x: ops.top_k_mask_logits(x, 1.5), r"top_k: expected an integer or integers"),
        (lambda x: ops.top_p_renorm_probs(x, 0.0), r"top_p: expected a number in \(0, 1\]"),
        (lambda x: ops.top_p_renorm_probs(x, float("nan")), r"top_p: expected a number in"),
        (lambda x: ops.top_p_renorm_probs(x, 1.01), r"top_p: expected a number in \(0, 1\]"),
        (lambda x: ops.top_k(x, 0), r"\[top_k\] k: expected a number in \[1, n\]"),
        (lambda x: ops.top_k(x, 9), r"\[top_k\] k: expected a number in \[1, n\]"),
    ],
)
def test_errors(call, message):
    with pytest.raises(_core.InvalidArgumentError, match=message):
        call(np.ones((2, 8), np.float32))


@pytest.mark.parametrize("vocab", [5, 2000])
def test_rows_without_a_distribution(isa, vocab):
    def row(value, place=3):
        x = np.ones((2, vocab), np.float32)
        x[1, place] = value
        return x

    nothing = np.full((2, vocab), -np.inf, np.float32)
    for bad, message in (
        (row(np.nan), "logits: expected numbers, got NaN in row 1"),
        (row(np.inf), "logits: expected a finite maximum, got infinity in row 1"),
        (nothing, "logits: expected a finite maximum, got nothing above -infinity in row 0"),
    ):
        with pytest.raises(_core.InvalidArgumentError, match=message):
            ops.softmax(bad)
    with pytest.raises(_core.InvalidArgumentError, match="NaN in row 1"):
        ops.top_k_mask_logits(row(np.nan), 2)
    with pytest.raises(_core.InvalidArgumentError, match=r"\[top_k\] input: .*NaN in row 1"):
        ops.top_k(row(np.nan, place=vocab - 1), 2)
    for value, message in (
        (np.nan, "probs: expected numbers, got NaN in row 1"),
        (np.inf, "probs: expected a finite sum, got infinity in row 1"),
        (-1.0, "probs: expected no negative values, got one in row 1"),
    ):
        with pytest.raises(_core.InvalidArgumentError, match=message):
            ops.top_p_renorm_probs(row(value), 0.5)
    with pytest.raises(_core.InvalidArgumentError, match="expected a positive sum, got 0 in row 0"):
        ops.top_p_renorm_probs(np.zeros((2, vocab), np.float32), 0.5)
    # Infinities are numbers where nothing is weighed.
    np.testing.assert_array_equal(ops.top_k(row(np.inf), 1)[1], [[0], [3]])

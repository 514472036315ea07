"""Sampling, filters and speculation on a GPU: the CPU's tokens, its distributions."""

import ml_dtypes
import numpy as np
import pytest

from effinfer import InvalidArgumentError, Queue, UnsupportedError, ops
from effinfer.ops import logits_pipe
from tests.ops.cuda.gpu_arrays import Producer, here, stream, there
from tests.ops.rows import DTYPES, random

every_dtype = pytest.mark.parametrize("dtype", DTYPES)
BATCH, VOCAB = 5, 700


def wide(x):
    return np.asarray(x).astype(np.float64)


def logits_of(seed, dtype="float32", shape=(BATCH, VOCAB)):
    return random(seed, *shape, dtype=dtype, spread=3)


def probs_of(seed, dtype="float32", shape=(BATCH, VOCAB)):
    x = np.exp(wide(random(seed, *shape)))
    return (x / x.sum(axis=-1, keepdims=True)).astype(DTYPES[dtype][0])


DRAWS = {
    "sampling_from_logits": ("logits", ()),
    "sampling_from_probs": ("probs", ()),
    "top_k_sampling_from_probs": ("probs", (7,)),
    "top_p_sampling_from_probs": ("probs", (0.8,)),
    "min_p_sampling_from_probs": ("probs", (0.1,)),
    "top_k_top_p_sampling_from_logits": ("logits", (9, 0.7)),
    "top_k_top_p_sampling_from_probs": ("probs", (9, 0.7)),
}


@every_dtype
@pytest.mark.parametrize("name", DRAWS)
def test_tokens_are_the_cpus(name, dtype):
    kind, parameters = DRAWS[name]
    x = (logits_of if kind == "logits" else probs_of)(1, dtype)
    op = getattr(ops, name)
    for seed in (3, 2**63 + 5):
        drawn = op(there(x), *parameters, seed=seed, offset=2)
        assert drawn.device == "cuda:0"
        expected = op(x, *parameters, seed=seed, offset=2)
        np.testing.assert_array_equal(here(drawn), expected)
        assert here(drawn).dtype == np.int32
        # Again, and in another stream.
        again = op(there(x), *parameters, seed=seed, offset=2, pool=Queue("cuda:0", stream(17)))
        np.testing.assert_array_equal(again.to_numpy(), expected)


@pytest.mark.parametrize("name", DRAWS)
def test_tokens_of_rows_that_blocks_share(name):
    kind, parameters = DRAWS[name]
    x = (logits_of if kind == "logits" else probs_of)(6, shape=(2, 9001))
    op = getattr(ops, name)
    expected = op(x, *parameters, seed=7)
    np.testing.assert_array_equal(here(op(there(x), *parameters, seed=7)), expected)


def test_both_filters_at_once():
    x = logits_of(2)
    draw = {"filter_apply_order": "joint", "seed": 5}
    expected = ops.top_k_top_p_sampling_from_logits(x, 40, 0.6, **draw)
    drawn = ops.top_k_top_p_sampling_from_logits(there(x), 40, 0.6, **draw)
    np.testing.assert_array_equal(here(drawn), expected)


@pytest.mark.parametrize("integers", [np.int32, np.int64])
def test_parameters_of_rows_lie_there_too(integers):
    x = logits_of(3)
    places = np.array([4, 0, 0, 2, 1, 3], integers)
    top_k = np.array([1, 7, 700, 30, 5, 2], integers)
    top_p = np.array([1, 0.5, 0.9, 0.8, 0.7, 0.3], np.float32)
    seeds = np.array([1, -2, 3, 4, 5, 2**40], np.int64)
    offsets = np.arange(6, dtype=np.int64)
    given = top_k, top_p, places, "top_k_first", True, None, False, seeds, offsets
    expected = ops.top_k_top_p_sampling_from_logits(x, *given)
    drawn = ops.top_k_top_p_sampling_from_logits(
        there(x), *(there(a) if isinstance(a, np.ndarray) else a for a in given)
    )
    assert here(drawn).dtype == integers
    np.testing.assert_array_equal(here(drawn), expected)


@pytest.mark.parametrize("name", ["top_k_sampling_from_probs", "min_p_sampling_from_probs"])
def test_draws_of_one_row_differ_as_the_cpus_do(name):
    """The CPU's follow the probabilities: tests/ops/test_sampling.py."""
    probs = probs_of(4, shape=(1, 8))
    parameter = {"top_k_sampling_from_probs": 6, "min_p_sampling_from_probs": 0.15}[name]
    places = np.zeros(200, np.int32)
    drawn = here(getattr(ops, name)(there(probs), parameter, there(places), seed=11))
    expected = getattr(ops, name)(probs, parameter, places, seed=11)
    np.testing.assert_array_equal(drawn, expected)
    assert np.unique(drawn).size > 2


@every_dtype
def test_filters(dtype):
    logits, probs = logits_of(5, dtype), probs_of(6, dtype)
    rounding = DTYPES[dtype][1]
    close = {"rtol": 4 * rounding, "atol": 1e-7}
    for temperature in (None, 0.5, np.linspace(0.2, 2, BATCH, dtype=np.float32)):
        given = there(temperature) if isinstance(temperature, np.ndarray) else temperature
        out = here(ops.softmax(there(logits), given))
        assert out.dtype == np.float32
        np.testing.assert_allclose(out, ops.softmax(logits, temperature), rtol=1e-6, atol=1e-30)
    for op, x, parameter in (
        (ops.top_k_renorm_probs, probs, 10),
        (ops.top_p_renorm_probs, probs, 0.4),
        (ops.top_k_mask_logits, logits, 13),
    ):
        out, expected = here(op(there(x), parameter)), op(x, parameter)
        assert out.dtype == expected.dtype
        np.testing.assert_allclose(wide(out), wide(expected), **close)


def test_rows_without_a_distribution():
    probs = probs_of(7)
    probs[1, 3] = np.nan
    probs[3] = 0
    drawn, valid = ops.sampling_from_probs(there(probs), seed=1, return_valid=True)
    np.testing.assert_array_equal(here(valid), [1, 0, 1, 0, 1])
    expected = ops.sampling_from_probs(probs, seed=1, return_valid=True)[0]
    np.testing.assert_array_equal(here(drawn), expected)
    np.testing.assert_array_equal(here(ops.sampling_from_probs(there(probs), seed=1)), expected)
    with pytest.raises(InvalidArgumentError, match="probs: expected numbers, got NaN in row 1"):
        ops.sampling_from_probs(there(probs), seed=1, check_nan=True)
    assert not here(ops.top_p_renorm_probs(there(probs), 0.5))[3].any()


@every_dtype
@pytest.mark.parametrize("sorted", [False, True])
def test_the_highest(sorted, dtype):
    for batch, vocab, k in ((3, 300, 7), (2, 5000, 400), (1, 5000, 4096), (2, 9, 9), (1, 1, 1)):
        x = logits_of(k, dtype, (batch, vocab))
        x[:, 1::7] = x[:, :1]
        values, ids = ops.top_k(there(x), k, sorted)
        expected_values, expected_ids = ops.top_k(x, k, sorted)
        np.testing.assert_array_equal(here(ids), expected_ids)
        np.testing.assert_array_equal(wide(here(values)), wide(expected_values))
        assert here(values).dtype == x.dtype
        assert here(ids).dtype == np.int64


def chain(seed, batch=4, drafts=3, vocab=200):
    rng = np.random.default_rng(seed)
    targets = rng.random((batch, drafts + 1, vocab), np.float32) ** 4
    targets /= targets.sum(-1, keepdims=True)
    probs = targets[:, :drafts] * 0.7 + 0.3 / vocab
    ids = probs.argmax(-1).astype(np.int32)
    return probs.astype(np.float32), ids, targets


def test_speculative_sampling():
    probs, ids, targets = chain(8)
    expected = ops.chain_speculative_sampling(probs, ids, targets, seed=4)
    made = ops.chain_speculative_sampling(there(probs), there(ids), there(targets), seed=4)
    for one, other in zip(made, expected, strict=True):
        np.testing.assert_array_equal(here(one), other)
    counts = there(np.full(4, 10, np.int32)), there(np.full(4, 20, np.int32))
    made = ops.chain_speculative_sampling(there(probs), there(ids), there(targets), *counts, seed=4)
    assert made[1] is counts[0] and made[2] is counts[1]
    np.testing.assert_array_equal(here(counts[0]), expected[1] + 10)
    np.testing.assert_array_equal(here(counts[1]), expected[2] + 20)


@every_dtype
def test_token_masks(dtype):
    x = logits_of(9, dtype, (4, 70))
    mask = np.random.default_rng(0).integers(-(2**31), 2**31, (4, 3)).astype(np.int32)
    for indices in (None, np.array([2, 0], np.int32), np.array([1], np.int64)):
        rows, expected = there(x), x.copy()
        given = None if indices is None else there(indices)
        assert ops.apply_token_bitmask(rows, there(mask), given) is None
        ops.apply_token_bitmask(expected, mask, indices)
        np.testing.assert_array_equal(wide(here(rows)), wide(expected))
    row = there(x[0])
    ops.apply_token_bitmask(row, there(mask[0]))
    ops.apply_token_bitmask(x[0], mask[0])
    np.testing.assert_array_equal(wide(here(row)), wide(x[0]))


def test_pipes():
    pipe = logits_pipe.LogitsPipe(
        [
            logits_pipe.Temperature(),
            logits_pipe.TopK(),
            logits_pipe.Softmax(),
            logits_pipe.TopP(),
            logits_pipe.Sample(),
        ]
    )
    x = logits_of(10)
    options = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 6}
    np.testing.assert_array_equal(here(pipe(there(x), **options)), pipe(x, **options))


def test_arrays_of_any_library():
    x = probs_of(11)
    producer = Producer(x)
    drawn = ops.top_p_sampling_from_probs(producer, 0.9, seed=2)
    np.testing.assert_array_equal(here(drawn), ops.top_p_sampling_from_probs(x, 0.9, seed=2))
    assert producer.exported == producer.deleted
    assert here(ops.sampling_from_probs(there(x[:0]), seed=1)).shape == (0,)


def test_what_is_refused():
    x = there(probs_of(12))
    on_cpu = "expected a tensor on cuda:0, got one on cpu"
    for call, error, message in (
        (lambda: ops.sampling_from_probs(x, np.zeros(2, np.int32), seed=1), InvalidArgumentError,
         r"indices: " + on_cpu),
        (lambda: ops.top_p_sampling_from_probs(x, np.full(5, 0.5), seed=1), InvalidArgumentError,
         r"top_p: " + on_cpu),
        (lambda: ops.top_p_sampling_from_probs(x, 1.5, seed=1), InvalidArgumentError,
         r"top_p: expected a number in \(0, 1\]"),
        (lambda: ops.top_p_sampling_from_probs(x, there(np.ones(4, np.float32)), seed=1),
         InvalidArgumentError, r"top_p: expected a scalar or shape \[5\]"),
        (lambda: ops.top_k_renorm_probs(there(np.zeros((2, 3), np.int32)), 1),
         InvalidArgumentError, "probs: expected float32, float16 or bfloat16"),
        (lambda: ops.sampling_from_probs(probs_of(1), there(np.zeros(5, np.int32))),
         UnsupportedError, "got one on cuda:0"),
        (lambda: ops.top_k(there(np.zeros((1, 5000), np.float32)), 4097, True), UnsupportedError,
         "at most 4096 are sorted"),
        (lambda: ops.apply_token_bitmask(x, there(np.zeros((5, 2), np.int32))),
         InvalidArgumentError, "bitmask: expected shape"),
        (lambda: ops.chain_speculative_sampling(*(there(a.astype(np.float16)) for a in chain(1))),
         InvalidArgumentError, "draft_probs: expected dtype f32, got f16"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()


def test_bfloat16_comes_back_as_such():
    x = logits_of(13, "bfloat16")
    out = ops.top_k_mask_logits(there(x), 3)
    assert here(out).dtype == ml_dtypes.bfloat16
    assert (here(out) > -np.inf).sum() == 3 * BATCH

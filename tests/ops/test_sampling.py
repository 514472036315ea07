"""Draws: their distributions, what they depend on, speculative sampling, token masks."""

import numpy as np
import pytest
import torch

from effinfer import _core, ops, testing
from tests.ops import row_reference as reference

DRAWS = 100_000
VOCAB = 60


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


LOGITS = random(0, 1, VOCAB) * 2
LOGITS[0, [3, 30]] = -np.inf
PROBS = reference.softmax(LOGITS).astype(np.float32)
P = PROBS[0].astype(np.float64)
MANY = {"indices": np.zeros(DRAWS, np.int32), "seed": 5}

FILTERS = {
    "sampling_from_probs": (lambda **d: ops.sampling_from_probs(PROBS, **d), P),
    "sampling_from_logits": (lambda **d: ops.sampling_from_logits(LOGITS, **d), P),
    "top_k": (lambda **d: ops.top_k_sampling_from_probs(PROBS, 7, **d), reference.top_k(P, 7)),
    "top_p": (lambda **d: ops.top_p_sampling_from_probs(PROBS, 0.8, **d), reference.top_p(P, 0.8)),
    "min_p": (lambda **d: ops.min_p_sampling_from_probs(PROBS, 0.1, **d), reference.min_p(P, 0.1)),
    "top_k_first": (
        lambda **d: ops.top_k_top_p_sampling_from_probs(PROBS, 9, 0.7, **d),
        reference.top_p(reference.top_k(P, 9), 0.7),
    ),
    "joint": (
        lambda **d: ops.top_k_top_p_sampling_from_probs(
            PROBS, 9, 0.7, filter_apply_order="joint", **d
        ),
        reference.joint(P, 9, 0.7),
    ),
    "logits, top_k_first": (
        lambda **d: ops.top_k_top_p_sampling_from_logits(LOGITS, 9, 0.7, **d),
        reference.top_p(reference.top_k(P, 9), 0.7),
    ),
    "logits, joint": (
        lambda **d: ops.top_k_top_p_sampling_from_logits(
            LOGITS, 9, 0.7, filter_apply_order="joint", **d
        ),
        reference.joint(P, 9, 0.7),
    ),
}


@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_the_distribution(isa, name):
    draw, expected = FILTERS[name]
    samples = draw(**MANY)
    assert samples.dtype == np.int32
    reference.assert_follows(samples, expected)


@pytest.mark.parametrize("name", FILTERS)
def test_seeds_of_rows_follow_the_distribution(name):
    draw, expected = FILTERS[name]
    places = np.zeros(DRAWS, np.int64)
    samples = draw(indices=places, seed=np.arange(DRAWS), offset=np.array([3]))
    assert samples.dtype == np.int64
    reference.assert_follows(samples, expected)


def test_offsets_follow_the_distribution():
    samples = ops.sampling_from_probs(
        PROBS, np.zeros(DRAWS, np.int32), seed=np.full(DRAWS, 9), offset=np.arange(DRAWS)
    )
    reference.assert_follows(samples, P)


def test_large_vocabularies(isa):
    """Of 100,000 tokens in 50 groups the groups' counts follow their masses."""
    logits = random(1, 1, 100_000)
    places = np.zeros(1000, np.int32)
    p = reference.softmax(logits)[0]
    for top_p in (1.0, 0.9):
        samples = ops.top_k_top_p_sampling_from_logits(logits, 80_000, top_p, places, seed=2)
        kept = reference.top_p(reference.top_k(p, 80_000), top_p)
        reference.assert_follows(samples // 2000, kept.reshape(50, 2000).sum(1))


def test_a_row_draws_alike_in_any_batch_team_and_isa():
    logits = random(2, 40, 3000) * np.float32(2)
    seeds = np.arange(40, dtype=np.int64) * 977

    def samples(rows, pool=None):
        return ops.top_k_top_p_sampling_from_logits(
            logits[rows], 300, 0.9, seed=seeds[rows], offset=np.full(len(rows), 7), pool=pool
        )

    expected = samples(np.arange(40))
    for level in testing.available_isas():
        with testing.isa(level):
            shuffled = np.random.default_rng(3).permutation(40)
            np.testing.assert_array_equal(samples(shuffled), expected[shuffled])
            for row in (0, 17, 39):
                assert samples(np.array([row]))[0] == expected[row]
            pool = _core.ThreadPool(3, oversubscribe=True)
            np.testing.assert_array_equal(samples(np.arange(40), pool), expected)
    assert len(set(expected)) > 30


def test_seed_and_offset_decide():
    x = np.ones((50, 1000), np.float32)
    first = ops.sampling_from_probs(x, seed=1)
    np.testing.assert_array_equal(first, ops.sampling_from_probs(x, seed=1, offset=0))
    for other in ({"seed": 2}, {"seed": 1, "offset": 1}, {"seed": 2**64 - 1}, {"seed": -3}):
        assert (ops.sampling_from_probs(x, **other) != first).sum() > 40
    assert (ops.sampling_from_probs(x) != ops.sampling_from_probs(x)).any()
    drawn = [ops.sampling_from_probs(x, generator=np.random.default_rng(4)) for _ in range(2)]
    np.testing.assert_array_equal(*drawn)
    # Unsigned seeds count by their bits.
    seeds = np.full(50, 2**63 + 5, np.uint64)
    alike = ops.sampling_from_probs(x, seed=seeds)
    assert len(set(alike)) == 1
    assert alike[0] == ops.sampling_from_probs(x[:1], seed=2**63 + 5)[0]


def test_torch_in_torch_out():
    probs = torch.from_numpy(PROBS).expand(8, -1)
    torch.manual_seed(3)
    first = ops.sampling_from_probs(probs)
    torch.manual_seed(3)
    again = ops.sampling_from_probs(probs)
    assert isinstance(first, torch.Tensor) and first.dtype == torch.int32
    assert torch.equal(first, again)
    generator = torch.Generator().manual_seed(5)
    drawn = ops.top_p_sampling_from_probs(probs, torch.full((8,), 0.8), generator=generator)
    expected = ops.top_p_sampling_from_probs(
        probs.numpy(), 0.8, generator=torch.Generator().manual_seed(5)
    )
    np.testing.assert_array_equal(drawn.numpy(), expected)
    logits = torch.from_numpy(LOGITS).bfloat16()
    masked = ops.top_k_mask_logits(logits, 4)
    assert masked.dtype == torch.bfloat16 and int(masked.isfinite().sum()) == 4


def test_valid_tells_rows_that_cannot_be_sampled(isa):
    probs = np.stack([np.eye(9, dtype=np.float32)[4], np.zeros(9, np.float32), np.ones(9)])
    probs = probs.astype(np.float32)
    probs[2, 3] = np.nan
    samples, valid = ops.top_k_sampling_from_probs(probs, 3, seed=1, return_valid=True)
    np.testing.assert_array_equal(samples, [4, 0, 0])
    np.testing.assert_array_equal(valid, [True, False, False])
    with pytest.raises(_core.InvalidArgumentError, match="positive sum, got 0 in row 1"):
        ops.top_k_sampling_from_probs(probs, 3, seed=1)
    with pytest.raises(_core.InvalidArgumentError, match="NaN in row 2"):
        ops.sampling_from_probs(probs, np.array([2]), check_nan=True)


def test_what_cannot_be_drawn_never_is(isa):
    rng = np.random.default_rng(6)
    probs = np.zeros((2000, 333), np.float32)
    places = rng.integers(0, 333, 2000)
    probs[np.arange(2000), places] = 10.0 ** rng.integers(-30, 30, 2000)
    np.testing.assert_array_equal(ops.sampling_from_probs(probs, seed=1), places)
    np.testing.assert_array_equal(ops.top_p_sampling_from_probs(probs, 1e-6, seed=1), places)
    np.testing.assert_array_equal(ops.top_k_sampling_from_probs(probs, 300, seed=1), places)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ops.sampling_from_probs(PROBS, np.array([1])),
            r"\] indices\[0\]: expected a row in \[0, 1",
        ),
        (lambda: ops.sampling_from_probs(PROBS, np.zeros(2)), r"indices: expected int32 or int64"),
        (
            lambda: ops.sampling_from_probs(PROBS, seed=np.arange(2)),
            r"seed: expected a scalar or shape",
        ),
        (lambda: ops.sampling_from_probs(PROBS, seed=1.5), r"seed: expected an integer"),
        (lambda: ops.sampling_from_probs(PROBS, generator=7), r"generator: expected a numpy"),
        (lambda: ops.min_p_sampling_from_probs(PROBS, -0.1), r"min_p: expected a number in \[0"),
        (lambda: ops.top_p_sampling_from_probs(PROBS, 2), r"\[top_p_sampling_from_probs\] top_p"),
        (lambda: ops.top_k_sampling_from_probs(PROBS, -1), r"top_k: expected at least 1, got -1"),
        (
            lambda: ops.top_k_top_p_sampling_from_probs(PROBS, 1, 1, filter_apply_order="both"),
            "filter_apply_order: expected one of",
        ),
    ],
)
def test_errors(call, message):
    with pytest.raises(_core.InvalidArgumentError, match=message):
        call()


def chains(draft, target, count, drafts, seed):
    """Drafts drawn from `draft` [n, V] and verified against `target` [n + 1, V]."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.choice(draft.shape[1], count, p=draft[i]) for i in range(drafts)], 1)
    shape = (count, drafts, draft.shape[1])
    return ops.chain_speculative_sampling(
        np.broadcast_to(draft, shape).astype(np.float32),
        ids.astype(np.int32),
        np.broadcast_to(target, (count, drafts + 1, draft.shape[1])).astype(np.float32),
        seed=seed,
    )


def test_speculation_preserves_the_target_distribution(isa):
    draft = reference.softmax(random(7, 2, 12))
    target = reference.softmax(random(8, 3, 12) * 2)
    tokens, accepted, emitted = chains(draft, target, DRAWS, 2, 9)
    # Whatever was drafted, each token follows the target at its place, given that there is one.
    reference.assert_follows(tokens[:, 0], target[0])
    for place in (1, 2):
        there = tokens[:, place]
        reference.assert_follows(there[there >= 0], target[place])
    np.testing.assert_array_equal((tokens >= 0).sum(1), emitted + 1)
    chance = np.minimum(draft, target[:2]).sum(1)
    assert abs(accepted.mean() - chance.sum()) < 0.01
    assert abs(emitted.mean() - (chance[0] + chance[0] * chance[1])) < 0.01


def test_greedy_speculation_is_exact(isa):
    rng = np.random.default_rng(10)
    drafts, targets = rng.integers(0, 3, (500, 4)), rng.integers(0, 3, (500, 5))
    eye = np.eye(40, dtype=np.float32)
    tokens, accepted, emitted = ops.chain_speculative_sampling(
        eye[drafts], drafts.astype(np.int32), eye[targets], seed=np.arange(500)
    )
    agree = drafts == targets[:, :4]
    np.testing.assert_array_equal(accepted, agree.sum(1))
    np.testing.assert_array_equal(emitted, np.cumprod(agree, 1).sum(1))
    for row, count in enumerate(emitted):
        np.testing.assert_array_equal(tokens[row, : count + 1], targets[row, : count + 1])
        assert (tokens[row, count + 1 :] == -1).all()


def test_speculation_adds_to_its_counts():
    same = np.full((3, 2, 10), 0.1, np.float32)
    target = np.full((3, 3, 10), 0.1, np.float32)
    accepted, emitted = np.full(3, 5, np.int32), np.full(3, 7, np.int32)
    tokens, a, e = ops.chain_speculative_sampling(
        same, np.ones((3, 2), np.int64), target, accepted, emitted, seed=1
    )
    assert a is accepted and e is emitted
    np.testing.assert_array_equal(accepted, 7)
    np.testing.assert_array_equal(emitted, 9)
    assert (tokens[:, :2] == 1).all() and (tokens[:, 2] >= 0).all()


def test_speculation_errors():
    draft, target = np.ones((2, 3, 5), np.float32), np.ones((2, 4, 5), np.float32)
    ids = np.zeros((2, 3), np.int32)
    for arguments, message in (
        ((draft, ids, target[:, :3]), r"target_probs: expected shape \[2, 4, 5\], got \[2, 3, 5"),
        ((draft, ids[:1], target), r"draft_token_ids: expected shape \[2, 3\]"),
        ((draft, ids + 5, target), r"draft_token_ids: expected ids in \[0, 5\), got 5"),
        ((draft[0], ids, target), "draft_probs: expected 3 dimensions"),
        ((draft, ids, target, np.zeros(3, np.int32)), "maybe_output_accepted_token_num: expected"),
        ((draft, ids, target * np.float32(np.nan)), "NaN in row 0"),
    ):
        with pytest.raises(_core.InvalidArgumentError, match=message):
            ops.chain_speculative_sampling(*arguments, seed=1)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 1000])
def test_bitmask(isa, dtype, vocab):
    rng = np.random.default_rng(vocab)
    allowed = rng.random((4, vocab)) < 0.3
    allowed[:, rng.integers(vocab)] = True
    words = -(-vocab // 32)
    padded = np.ones((4, words * 32), bool)  # bits past the vocabulary do not count
    padded[:, :vocab] = allowed
    mask = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    logits = random(12, 4, vocab).astype(dtype)
    expected = np.where(allowed, logits, -np.inf)
    given = logits.copy()
    assert ops.apply_token_bitmask(given, mask) is None
    np.testing.assert_array_equal(given, expected)
    given = logits.copy()
    ops.apply_token_bitmask(given, mask, [2, 0])
    np.testing.assert_array_equal(given[[0, 2]], expected[[0, 2]])
    np.testing.assert_array_equal(given[[1, 3]], logits[[1, 3]])
    one = logits[1].copy()
    ops.apply_token_bitmask(one, mask[1])
    np.testing.assert_array_equal(one, expected[1])


def test_bitmask_errors():
    logits, mask = np.zeros((2, 40), np.float32), np.full((2, 2), -1, np.int32)
    empty = mask.copy()
    empty[1] = [0, 1 << 8]
    frozen = logits.copy()
    frozen.flags.writeable = False
    for arguments, message in (
        ((logits, mask[:, :1]), r"bitmask: expected shape \[2, 2\], got \[2, 1\]"),
        ((logits, mask.astype(np.int64)), "bitmask: expected dtype i32"),
        ((logits, empty), "bitmask: expected an allowed token in each row, got none in row 1"),
        ((logits, mask, [2]), r"indices\[0\]: expected a row in \[0, 2\), got 2"),
        ((frozen, mask), "logits: expected a writable array"),
        ((logits[:, ::2], mask[:, :1]), "logits: expected a C-contiguous array"),
    ):
        with pytest.raises(_core.InvalidArgumentError, match=message):
            ops.apply_token_bitmask(*arguments)
    assert not logits.any()

"""Sampling: each filter against a float64 reference, draws against their distribution."""

import numpy as np
import pytest

from effinfer import _core
from effinfer._core import Sampler, SamplingParams

FILTERS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 100_000},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"typical_p": 0.2},
    {"typical_p": 0.95},
    {"temperature": 1.7, "top_k": 50, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 0.8, "top_k": 40, "typical_p": 0.9, "top_p": 0.9},
    {"typical_p": 0.9, "min_p": 0.05},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.7},
    {"logit_bias": {3: 5.0, 0: -2.5}, "top_p": 0.7},
    {"logit_bias": {1: float("-inf")}, "repetition_penalty": 0.5, "temperature": 0.0},
]


def kept(probabilities, order, mass):
    """The shortest head of `order` that holds `mass` of `probabilities`."""
    cumulative = np.cumsum(probabilities[order])
    return order[: int(np.searchsorted(cumulative, mass * cumulative[-1])) + 1]


def restrict(probabilities, tokens):
    out = np.zeros_like(probabilities)
    out[tokens] = probabilities[tokens]
    return out / out.sum()


def reference(logits, prompt=(), output=(), **fields):
    """The documented filters, one after the other, in float64."""
    x = np.asarray(logits, dtype=np.float64).copy()
    for token, bias in fields.get("logit_bias", {}).items():
        x[token] += bias
    penalty = fields.get("repetition_penalty", 1.0)
    for token in {*prompt, *output}:
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token in set(output):
        x[token] -= fields.get("frequency_penalty", 0.0) * list(output).count(token)
        x[token] -= fields.get("presence_penalty", 0.0)
    temperature = fields.get("temperature", 1.0)
    if temperature == 0.0:
        return (np.arange(len(x)) == np.argmax(x)).astype(np.float64)
    x = (x - x.max()) / temperature
    p = np.exp(x) / np.exp(x).sum()
    likeliest = np.lexsort((np.arange(len(p)), -x))
    if fields.get("top_k", 0):
        p = restrict(p, likeliest[: fields["top_k"]])
    if fields.get("typical_p", 1.0) < 1.0:
        live = np.flatnonzero(p)
        surprise = -np.log(p[live])
        distance = np.abs(surprise - (p[live] * surprise).sum())
        order = live[np.lexsort((live, distance))]
        p = restrict(p, kept(p, order, fields["typical_p"]))
    if fields.get("top_p", 1.0) < 1.0:
        p = restrict(p, kept(p, likeliest[p[likeliest] > 0], fields["top_p"]))
    if fields.get("min_p", 0.0) > 0.0:
        p = restrict(p, np.flatnonzero(p >= fields["min_p"] * p.max()))
    return p


def random_row(rng, vocab, scale=3.0):
    return (rng.standard_normal(vocab) * scale).astype(np.float32)


@pytest.mark.parametrize("fields", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [5, 64, 1000, 33_333])
def test_filters_match_the_reference(fields, vocab):
    rng = np.random.default_rng(vocab)
    sampler = Sampler()
    for scale in (0.5, 3.0, 12.0):
        logits = random_row(rng, vocab, scale)
        prompt, output = rng.integers(0, vocab, 30), rng.integers(0, vocab, 20)
        got = sampler.distribution(logits, SamplingParams(**fields), prompt, output)
        want = reference(logits, prompt, output, **fields)
        assert np.isclose(got.sum(), 1.0, atol=1e-5)
        # The float32 logits are scaled before exp: their rounding is relative to their range.
        range_over_t = np.ptp(logits) / (fields.get("temperature", 1.0) or 1.0)
        tolerance = np.finfo(np.float32).eps * (8 + range_over_t)
        assert np.abs(got - want).max() <= tolerance * max(1.0, want.max())
        assert np.array_equal(got > 1e-30, want > 1e-30)


def test_ties_go_to_the_lowest_ids():
    logits = np.zeros(300, dtype=np.float32)
    sampler = Sampler()
    for fields, count in (({"top_k": 10}, 10), ({"top_p": 0.1}, 30), ({"typical_p": 0.1}, 30)):
        p = sampler.distribution(logits, SamplingParams(**fields))
        # A uniform distribution's cumulative sum may round either way at the boundary.
        support = np.flatnonzero(p)
        assert abs(len(support) - count) <= (0 if "top_k" in fields else 1)
        assert support[0] == 0 and support[-1] == len(support) - 1
    assert sampler.sample(logits, SamplingParams(temperature=0.0)).token == 0


@pytest.mark.parametrize(
    "fields", [{}, {"top_k": 20}, {"top_p": 0.8, "temperature": 0.7}, {"typical_p": 0.9}], ids=str
)
def test_draws_follow_the_distribution(fields):
    rng = np.random.default_rng(5)
    logits = random_row(rng, 200, 1.5)
    params = SamplingParams(seed=11, **fields)
    sampler = Sampler()
    draws = 20_000
    counts = np.bincount(
        [sampler.sample(logits, params, index=i).token for i in range(draws)], minlength=200
    )
    expected = reference(logits, **fields) * draws
    assert not counts[expected == 0].any()
    # Cells of at least five expected draws; the rest form one cell.
    large = expected >= 5
    cells = np.append(expected[large], expected[~large].sum())
    seen = np.append(counts[large], counts[~large].sum())
    cells, seen = cells[cells > 0], seen[cells > 0]
    chi_squared = ((seen - cells) ** 2 / cells).sum()
    freedom = len(cells) - 1
    # Wilson and Hilferty: five standard deviations of the cube root.
    spread = 2 / (9 * freedom)
    assert chi_squared < freedom * (1 - spread + 5 * spread**0.5) ** 3


def test_a_draw_depends_on_seed_and_index_alone():
    rng = np.random.default_rng(9)
    rows = [random_row(rng, 500) for _ in range(40)]
    params = [SamplingParams(seed=seed) for seed in (0, 1, 2**63 + 5)]
    fresh = [[Sampler().sample(row, p, index=3).token for row in rows] for p in params]
    shared = Sampler()
    for order in (range(40), reversed(range(40))):
        for i in order:
            shared.sample(rows[i], SamplingParams(top_k=3, repetition_penalty=2.0), [1, 2], [3])
            assert shared.sample(rows[i], params[1], index=3).token == fresh[1][i]
    assert fresh[0] != fresh[1] != fresh[2]
    other_index = [Sampler().sample(row, params[0], index=4).token for row in rows]
    assert other_index != fresh[0]


def test_logprobs_are_of_the_unfiltered_distribution():
    rng = np.random.default_rng(3)
    logits = random_row(rng, 1000)
    log_p = logits - np.log(np.exp(logits.astype(np.float64)).sum())
    params = SamplingParams(temperature=0.2, top_k=5, logit_bias={7: 50.0}, logprobs=4)
    sampled = Sampler().sample(logits, params)
    assert sampled.token == 7
    assert np.isclose(sampled.logprob, log_p[7], rtol=1e-5)
    best = np.argsort(-logits)[:4]
    assert [token for token, _ in sampled.top] == best.tolist()
    assert np.allclose([value for _, value in sampled.top], log_p[best], rtol=1e-5)
    assert Sampler().sample(logits, SamplingParams(temperature=0.0, logprobs=0)).top == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("typical_p", 0.0),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", float("nan")),
        ("presence_penalty", float("inf")),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: float("nan")}),
        ("max_tokens", 0),
        ("stop_token_ids", [-5]),
        ("logprobs", -2),
    ],
)
def test_bad_values_name_the_field(field, value):
    with pytest.raises(_core.InvalidArgumentError, match=rf"\[sampling\] {field}: expected"):
        SamplingParams(**{field: value})


def test_ids_are_checked_against_the_vocabulary():
    SamplingParams(stop_token_ids=[10]).validate(11)
    with pytest.raises(ValueError, match="stop_token_ids"):
        SamplingParams(stop_token_ids=[10]).validate(10)
    with pytest.raises(ValueError, match="logit_bias"):
        Sampler().sample(np.zeros(4), SamplingParams(logit_bias={4: 1.0}))
    with pytest.raises(ValueError, match="output"):
        Sampler().sample(np.zeros(4), SamplingParams(presence_penalty=1.0), output=[9])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {}, {"top_p": 0.5}], ids=str)
def test_broken_logits_are_refused(bad, fields):
    logits = np.zeros(100, dtype=np.float32)
    logits[50] = bad
    with pytest.raises(ValueError, match=r"\[sampling\] logits"):
        Sampler().sample(logits, SamplingParams(**fields))
    with pytest.raises(ValueError, match="finite maximum"):
        Sampler().sample(np.full(4, -np.inf), SamplingParams(**fields))


def test_minus_infinity_forbids_a_token():
    logits = np.full(50, -np.inf, dtype=np.float32)
    logits[[4, 9]] = 0.0
    for fields in ({}, {"top_k": 5}, {"typical_p": 0.9}, {"top_p": 0.99}, {"min_p": 0.5}):
        p = Sampler().distribution(logits, SamplingParams(**fields))
        np.testing.assert_array_equal(p[[4, 9]], 0.5)
        assert not np.delete(p, [4, 9]).any()


def test_repr_shows_every_field():
    params = SamplingParams(top_k=3, logit_bias={2: 0.5})
    assert eval(repr(params)).logit_bias == {2: 0.5}
    assert "top_k=3" in repr(params)

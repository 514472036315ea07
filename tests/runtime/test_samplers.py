"""Bad words, DRY, top-n-sigma, XTC and mirostat: each against its definition in float64."""

import numpy as np
import pytest

from effinfer import _core
from effinfer._core import Mirostat, Sampler, SamplingParams


def random_row(rng, vocab, scale=3.0):
    return (rng.standard_normal(vocab) * scale).astype(np.float32)


def softmax(x):
    e = np.exp(np.asarray(x, dtype=np.float64) - np.max(x))
    return e / e.sum()


def close(got, want, logits):
    """The float32 logits are scaled before exp: their rounding is relative to their range."""
    finite = logits[np.isfinite(logits)]
    tolerance = np.finfo(np.float32).eps * (8 + np.ptp(finite))
    return np.abs(got - want).max() <= tolerance and np.array_equal(got > 1e-30, want > 1e-30)


# --- bad words -----------------------------------------------------------------------------------


def without_bad_words(logits, output, words):
    x = np.asarray(logits, dtype=np.float64).copy()
    for word in words:
        if list(output[len(output) - len(word) + 1 :]) == list(word[:-1]):
            x[word[-1]] = -np.inf
    return x


@pytest.mark.parametrize("seed", range(5))
def test_a_bad_word_is_never_completed(seed):
    rng = np.random.default_rng(seed)
    logits = random_row(rng, 6)
    words = [rng.integers(0, 6, size).tolist() for size in (1, 2, 2, 3, 4)]
    params = SamplingParams(bad_words=words)
    for size in range(12):
        output = rng.integers(0, 6, size).tolist()
        want = without_bad_words(logits, output, words)
        if not np.isfinite(want).any():
            continue
        got = Sampler().distribution(logits, params, [0, 1, 2], output)
        assert close(got, softmax(want), logits)


def test_words_of_the_prompt_are_no_beginning():
    params = SamplingParams(bad_words=[[1, 2]])
    logits = np.zeros(4, dtype=np.float32)
    assert Sampler().distribution(logits, params, [1], [])[2] == 0.25
    assert Sampler().distribution(logits, params, [], [1])[2] == 0.0


def test_a_row_of_bad_words_alone_is_refused():
    params = SamplingParams(bad_words=[[0], [1]])
    with pytest.raises(_core.InvalidArgumentError, match="finite maximum"):
        Sampler().sample(np.zeros(2, dtype=np.float32), params)


# --- DRY -----------------------------------------------------------------------------------------


def dry_penalties(text, multiplier, base, allowed_length, last_n=-1, breakers=()):
    """By definition: for each token, the longest end of the text that it followed before."""
    if last_n >= 0:
        text = text[len(text) - min(last_n, len(text)) :]
    longest = {}
    for place in range(1, len(text)):
        token = text[place]
        if token in breakers:
            continue
        length = 0
        while (
            length < place
            and text[place - 1 - length] == text[len(text) - 1 - length]
            and text[len(text) - 1 - length] not in breakers
        ):
            length += 1
        longest[token] = max(longest.get(token, 0), length)
    return {
        token: multiplier * base ** (length - allowed_length)
        for token, length in longest.items()
        if length >= allowed_length
    }


@pytest.mark.parametrize("vocab", [2, 3, 8])
@pytest.mark.parametrize("last_n", [-1, 0, 1, 7, 500])
def test_dry_matches_its_definition(vocab, last_n):
    rng = np.random.default_rng(vocab * 1000 + last_n)
    for _ in range(40):
        prompt, output = (rng.integers(0, vocab, rng.integers(0, 25)).tolist() for _ in range(2))
        breakers = sorted({int(b) for b in rng.integers(0, vocab, rng.integers(0, 2))})
        allowed = int(rng.integers(1, 4))
        logits = random_row(rng, vocab, 1.0)
        params = SamplingParams(
            dry_multiplier=0.7,
            dry_base=1.3,
            dry_allowed_length=allowed,
            dry_penalty_last_n=last_n,
            dry_sequence_breakers=breakers,
        )
        want = logits.astype(np.float64)
        found = dry_penalties(prompt + output, 0.7, 1.3, allowed, last_n, breakers)
        for token, penalty in found.items():
            want[token] -= penalty
        got = Sampler().distribution(logits, params, prompt, output)
        # Penalties are float32: of up to 1.3^49.
        scale = max([1.0, *found.values()])
        tolerance = np.finfo(np.float32).eps * (8 + np.ptp(want) + scale)
        assert np.abs(got - softmax(want)).max() <= tolerance


def test_dry_breaks_a_loop_and_stays_finite():
    logits = np.array([5.0, 0.0, 0.0], dtype=np.float32)
    params = SamplingParams(temperature=0.0, dry_multiplier=1.0, dry_base=4.0)
    assert Sampler().sample(logits, params, [0], []).token == 0
    assert Sampler().sample(logits, params, [0] * 2000, []).token == 1
    only = np.array([0.0, -np.inf, -np.inf], dtype=np.float32)
    assert Sampler().sample(only, params, [0] * 2000, []).token == 0


# --- top-n-sigma ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0.0, 0.1, 1.0, 3.0, 100.0])
def test_top_n_sigma_matches_its_definition(n):
    for vocab in (1, 2, 50, 5000):
        rng = np.random.default_rng(vocab)
        logits = random_row(rng, vocab)
        logits[rng.random(vocab) < 0.2] = -np.inf
        logits[0] = 1.0
        x = logits.astype(np.float64)
        finite = x[np.isfinite(x)]
        if n > 0:
            x[x < finite.max() - n * finite.std()] = -np.inf
        for temperature in (0.5, 1.0, 2.0):  # which does not change who stays
            params = SamplingParams(top_n_sigma=n, temperature=temperature)
            got = Sampler().distribution(logits, params)
            assert close(got, softmax(x / temperature), logits / temperature)


def test_top_n_sigma_refuses_a_nan():
    with pytest.raises(_core.InvalidArgumentError, match="NaN"):
        Sampler().sample(np.array([0.0, np.nan, 1.0]), SamplingParams(top_n_sigma=1.0))


# --- XTC -----------------------------------------------------------------------------------------


def without_top_choices(p, threshold):
    top = [i for i in np.argsort(-p, kind="stable") if p[i] >= threshold]
    out = p.copy()
    out[top[:-1]] = 0.0
    return out / out.sum()


@pytest.mark.parametrize("threshold", [0.0, 0.01, 0.1, 0.3, 0.6, 1.0])
def test_xtc_keeps_the_least_of_the_likely(threshold):
    for vocab in (1, 2, 7, 300):
        rng = np.random.default_rng(vocab)
        for _ in range(5):
            logits = random_row(rng, vocab, 1.5)
            params = SamplingParams(xtc_probability=1.0, xtc_threshold=threshold)
            p = softmax(logits)
            if np.abs(p - threshold).min() < 1e-6:
                continue
            got = Sampler().distribution(logits, params)
            assert close(got, without_top_choices(p, threshold), logits)


def test_xtc_never_keeps_what_cannot_come():
    logits = np.array([1.0, -np.inf, 2.0, -np.inf], dtype=np.float32)
    params = SamplingParams(xtc_probability=1.0, xtc_threshold=0.0)
    assert Sampler().distribution(logits, params).tolist() == [1.0, 0.0, 0.0, 0.0]


def test_xtc_of_equals_keeps_the_last():
    params = SamplingParams(xtc_probability=1.0, xtc_threshold=0.2)
    got = Sampler().distribution(np.zeros(4, dtype=np.float32), params)
    assert got.tolist() == [0.0, 0.0, 0.0, 1.0]


def test_xtc_acts_as_often_as_it_says():
    logits = np.array([2.0, 1.0, 0.0, -9.0], dtype=np.float32)
    params = SamplingParams(xtc_probability=0.3, xtc_threshold=0.05, seed=3)
    draws = 4000
    tokens = [Sampler().sample(logits, params, index=i).token for i in range(draws)]
    acts = [Sampler().distribution(logits, params, index=i)[0] == 0 for i in range(draws)]
    # Five standard deviations of a binomial.
    spread = 5 * np.sqrt(draws * 0.3 * 0.7)
    assert abs(sum(acts) - 0.3 * draws) < spread
    assert all(token >= 2 for token, acted in zip(tokens, acts, strict=True) if acted)
    # What is drawn does not depend on whether it acts.
    plain = softmax(logits)[0] * (draws - sum(acts))
    assert abs(tokens.count(0) - plain) < 5 * np.sqrt(plain)


# --- mirostat ------------------------------------------------------------------------------------


def mirostat_kept(p, bound, version):
    """Who stays: ids of the likeliest, ties by id."""
    order = np.argsort(-p, kind="stable")
    if version == 2:
        count = int((-np.log2(p) <= bound).sum())
        return order[: max(count, 1)]
    likeliest = p[order][:100]
    if len(likeliest) < 2:
        return order
    ranks = np.arange(1, len(likeliest))
    t = np.log((ranks + 1) / ranks)
    b = np.log(likeliest[:-1] / likeliest[1:])
    s = (t * b).sum() / (t * t).sum()
    with np.errstate(all="ignore"):
        count = ((s - 1) * 2**bound / (1 - len(p) ** (1 - s))) ** (1 / s)
    if not count < len(p):
        return order
    return order[: max(int(count), 1)]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tau", [0.0, 1.0, 3.0, 6.0])
def test_mirostat_matches_its_definition(version, tau):
    for vocab in (1, 2, 40, 2000):
        rng = np.random.default_rng(vocab)
        params = SamplingParams(
            mirostat=version, mirostat_tau=tau, mirostat_eta=0.3, temperature=0.9, seed=5
        )
        sampler, state, bound = Sampler(), Mirostat(), 2 * tau
        assert state.most_bits is None
        for index in range(20):
            logits = random_row(rng, vocab)
            p = softmax(logits.astype(np.float64) / 0.9)
            kept = mirostat_kept(p, bound, version)
            want = np.zeros(vocab)
            want[kept] = p[kept] / p[kept].sum()
            got = sampler.distribution(logits, params, index=index, mirostat=state)
            assert close(got, want, logits / 0.9)
            token = sampler.sample(logits, params, index=index, mirostat=state).token
            assert token in kept
            bound -= 0.3 * (-np.log2(p[token]) - tau)
            assert np.isclose(state.most_bits, bound, rtol=1e-5, atol=1e-4)
            bound = state.most_bits


def test_mirostat_holds_the_mean_surprise():
    rng = np.random.default_rng(0)
    rank = np.arange(1, 5001)
    logits = (-1.1 * np.log(rng.permutation(rank))).astype(np.float32)
    p = softmax(logits)
    for version in (1, 2):
        for tau in (3.5, 5.0, 6.0):  # the likeliest has 2.66
            params = SamplingParams(mirostat=version, mirostat_tau=tau, seed=1)
            sampler, state = Sampler(), Mirostat()
            tokens = [
                sampler.sample(logits, params, index=i, mirostat=state).token for i in range(3000)
            ]
            surprise = -np.log2(p[tokens])
            # The bound ends where it began but for what it moved: the mean of the errors is
            # (first bound - last bound) / (eta * draws).
            assert abs(surprise.mean() - tau) < (2 * tau + 20) / (0.1 * 3000)


def test_mirostat_is_off_where_the_likeliest_is_taken():
    logits = random_row(np.random.default_rng(1), 100)
    state = Mirostat()
    params = SamplingParams(mirostat=2, temperature=0.0)
    assert Sampler().sample(logits, params, mirostat=state).token == logits.argmax()
    assert state.most_bits is None


# --- all -----------------------------------------------------------------------------------------

SHORT_CUTS = [
    ({}, True),
    ({"temperature": 0.0}, True),
    ({"top_k": 5, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.9, "seed": 3}, True),
    ({"prompt_logprobs": 1}, True),
    ({"logprobs": 0}, False),
    ({"logit_bias": {1: 1.0}}, False),
    ({"bad_words": [[1]]}, False),
    ({"repetition_penalty": 1.1}, False),
    ({"presence_penalty": 0.1}, False),
    ({"frequency_penalty": 0.1}, False),
    ({"dry_multiplier": 0.8}, False),
    ({"top_n_sigma": 1.0}, False),
    ({"xtc_probability": 0.5}, False),
    ({"mirostat": 2}, False),
]


@pytest.mark.parametrize(("fields", "plain"), SHORT_CUTS, ids=str)
def test_what_may_be_sampled_in_a_shorter_way(fields, plain):
    assert SamplingParams(**fields).is_plain() == plain


BAD_FIELDS = [
    ("bad_words", [[]]),
    ("bad_words", [[-1]]),
    ("bad_words", ["no"]),
    ("dry_multiplier", -0.1),
    ("dry_multiplier", float("nan")),
    ("dry_base", 0.9),
    ("dry_allowed_length", 0),
    ("dry_penalty_last_n", -2),
    ("dry_sequence_breakers", [3, 2]),
    ("top_n_sigma", -1.0),
    ("top_n_sigma", float("inf")),
    ("xtc_probability", 1.1),
    ("xtc_threshold", -0.1),
    ("mirostat", 3),
    ("mirostat", "v2"),
    ("mirostat_tau", -1.0),
    ("mirostat_eta", float("nan")),
    ("prompt_logprobs", -2),
    ("max_tokens", 0),
    ("seed", 2**64),
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS, ids=str)
def test_a_wrong_field_is_named(field, value):
    with pytest.raises(_core.InvalidArgumentError, match=rf"\[sampling\] {field}: expected"):
        SamplingParams(**{field: value})

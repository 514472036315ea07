"""H2O and Keyformer: what is summed of keys, and which stay."""

from typing import Any

import numpy as np
import pytest

import effinfer
from effinfer import LLM
from effinfer.techniques import H2O, Keyformer, Technique
from effinfer.testing import make_model
from tests.techniques.eviction_model import (
    CONTEXT,
    GROUP,
    best,
    greedy,
    load,
    noting,
    prompt_of,
    watched,
)
from tests.techniques.watching import watching


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_model("llama-tiny", tmp_path_factory.mktemp("models") / "m.gguf", context=CONTEXT)


def test_h2o_sums_what_all_rows_attend_to(path):
    everything = H2O(budget=500, recent=400)
    seen = watched(path, everything, prompt_of(200), 30, when="every", tokens=7)
    for count, (scores, keys) in zip((207, 214, 221, 228), seen[::2], strict=True):
        assert keys.shape[1] == count
        np.testing.assert_allclose(scores.sum(axis=1), count * GROUP, rtol=count * 2**-24)
        assert scores[:, 0].min() >= GROUP  # of the first row all


def test_h2o_may_forget_and_may_rank_by_maxima(path):
    last, most = (
        H2O(budget=500, recent=400, decay=0.0),
        H2O(budget=500, reduce="maximum", recent=400),
    )
    (scores, _), *_ = watched(path, last, prompt_of(200), 30, when="every", tokens=7)
    np.testing.assert_allclose(scores.sum(axis=1), GROUP, rtol=207 * 2**-24)  # the last row's
    (maxima, _), *_ = watched(path, most, prompt_of(200), 30, when="every", tokens=7)
    assert (maxima[:, 0] == 1).all() and (maxima > 0).all()  # the first row has one key
    assert (maxima <= 1).all() and (maxima.sum(axis=1) > GROUP).all()
    for wrong in ({"decay": 1.5}, {"decay": -0.1}, {"reduce": "mean"}):
        with pytest.raises(effinfer.InvalidArgumentError, match=next(iter(wrong))):
            H2O(**wrong)


@pytest.mark.parametrize("rule", [{}, {"decay": 0.9}, {"reduce": "maximum"}])
def test_h2o_keeps_the_slots_that_have_had_most(path, rule):
    method = H2O(budget=100, recent=20, stride=10, chunk_tokens=64, **rule)
    seen = watched(path, method, prompt_of(150), 60, when="every", tokens=1)
    dropped = 0
    for (scores, keys), (kept_scores, kept_keys) in zip(seen[::2], seen[1::2], strict=True):
        count = kept_scores.shape[1]
        assert 90 < count <= 100
        dropped += scores.shape[1] > count
        lists = best(scores, 1, count, method.recent)
        np.testing.assert_array_equal(kept_scores, np.take_along_axis(scores, lists, axis=1))
        expected = np.stack([keys[head][lists[head]] for head in range(2)])
        np.testing.assert_array_equal(kept_keys, expected)
    assert dropped >= 5


def probabilities(path: Any, method: Technique, prompt: list[int]) -> Any:
    return load(path, method).generate([prompt], greedy(40, logprobs=0))[0].logprobs


def test_keyformer_without_noise_ranks_as_h2o(path):
    sizes = {"budget": 100, "recent": 20, "stride": 10, "chunk_tokens": 64}
    expected = probabilities(path, H2O(**sizes), prompt_of(150))
    assert probabilities(path, Keyformer(**sizes, noise=0.0), prompt_of(150)) == expected
    noisy = [probabilities(path, Keyformer(**sizes), prompt_of(150)) for _ in range(2)]
    assert noisy[0] == noisy[1] != expected
    hot = Keyformer(**sizes, noise=0.0, temperature=3.0)
    assert probabilities(path, hot, prompt_of(150)) != expected


def test_keyformer_draws_noise_by_prompt_position_and_head(path):
    keep_all = Keyformer(budget=500, recent=400)
    noise: list[np.ndarray] = []
    for prompt in (prompt_of(300), prompt_of(300), prompt_of(301)):
        seen: list[Any] = []
        llms: list[LLM] = []
        watch = watching(noting("keyformer.noise", llms, seen), when="every", tokens=9)
        llms.append(load(path, watch, keep_all, precision="f32", kv_dtype="f32"))
        assert llms[0].generate([prompt], greedy(12))[0].error == ""
        noise.append(seen[0][0])
    assert noise[0].shape == (4, 309)
    np.testing.assert_array_equal(noise[0], noise[1])
    assert len(np.unique(noise[0])) > 1200  # a number of its own for each head and position
    assert abs(np.corrcoef(noise[0][0], noise[2][0][:309])[0, 1]) < 0.3
    # Gumbel: mean 0.577, deviation 1.283; of 1,236 numbers within 4 errors of the mean.
    assert abs(noise[0].mean() - 0.577) < 4 * 1.283 / 1236**0.5


def test_keyformer_adds_noise_to_logits_and_divides_by_the_temperature(path):
    """With noise of 1,000 times a head's own, whoever has most among the keys that a row sees gets
    all of it."""
    loud = Keyformer(budget=500, recent=400, noise=1000.0, temperature=2.0)
    seen: list[Any] = []
    llms: list[LLM] = []
    watches = [
        watching(noting(plane, llms, seen), name, when="prompt_end")
        for name, plane in (("one", "keyformer"), ("two", "keyformer.noise"))
    ]
    llms.append(load(path, *watches, loud, precision="f32", kv_dtype="f32"))
    assert llms[0].generate([prompt_of(200)], greedy(2))[0].error == ""
    (scores, _), (noise, _) = seen
    winners = np.maximum.accumulate(noise, axis=1)
    for head in range(4):
        rows = [int(np.flatnonzero(noise[head] == winner)[0]) for winner in winners[head]]
        expected = GROUP * np.bincount(rows, minlength=200)
        assert np.abs(scores[head] - expected).max() < 0.5

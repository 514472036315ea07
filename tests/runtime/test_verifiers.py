"""Verifiers by name, in engines: greedy texts are plain decoding's under each of them, and metrics
say what they promise. Their distributions are proven in tests/cpp/test_verifiers.cpp."""

import numpy as np
import pytest

import effinfer
from effinfer._core import SamplingParams
from effinfer.checkpoints.model_files import open_model
from effinfer.speculation import VERIFIERS, Draft, Proposer, Speculation, Verifier
from effinfer.techniques import ADED, SuffixDecoding
from tests.reference import tiny
from tests.runtime.test_drafts import Guesser, make_engine, ragged, run, same

GUARANTEES = {
    "match": "same_text",
    "rejection": "same_distribution",
    "traversal": "same_distribution",
    "typical": "lossy",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "llama.gguf"
    return open_model(tiny.write_gguf(tiny.FAMILIES["llama"], path))


@pytest.mark.parametrize("name", VERIFIERS)
def test_greedy_texts_stay(model, name):
    asks = ragged(6, tiny.VOCAB_SIZE, temperature=0.0)
    plain = run(make_engine(model, prefix_cache=False), asks)
    guesser = Guesser(asks, plain, tiny.VOCAB_SIZE, seed=5)
    speculation = Speculation([guesser], verify=name, controller=20).build()
    engine = make_engine(model, prefix_cache=False, speculation=speculation)
    same(run(engine, asks), plain)
    assert guesser.accepted > 40
    assert engine.metrics(1)["speculation"]["guarantee"] == GUARANTEES[name]


@pytest.mark.parametrize("name", ["rejection", "traversal"])
def test_sampled_texts_are_the_same_each_time(model, name):
    asks = ragged(6, tiny.VOCAB_SIZE, temperature=0.9)
    speculations = [Speculation([SuffixDecoding(), ADED()], verify=name, controller=9)] * 2
    first, second = (
        run(make_engine(model, prefix_cache=False, speculation=s.build()), asks)
        for s in speculations
    )
    same(first, second)


@pytest.mark.parametrize("name", ["rejection", "traversal", "typical"])
def test_without_a_draft_a_sampled_text_is_plain_decodings(model, name):
    asks = [
        (p, SamplingParams(temperature=0.9, seed=3, max_tokens=30, ignore_eos=True))
        for p, _ in ragged(2, tiny.VOCAB_SIZE)
    ]
    plain = run(make_engine(model, prefix_cache=False), asks)
    speculation = Speculation([], verify=name).build()
    same(run(make_engine(model, prefix_cache=False, speculation=speculation), asks), plain)


def test_explain_says_what_is_promised_and_wrong_names_are_refused():
    text = Speculation([ADED()], verify="typical").explain()
    assert "verifier typical: lossy" in text
    wrong = Speculation([ADED()], verify="best")
    with pytest.raises(effinfer.InvalidArgumentError, match='expected "match", "rejection"'):
        wrong.build()
    with pytest.raises(effinfer.InvalidArgumentError, match=r"epsilon: expected .* \[0, 1\]"):
        effinfer._core.typical_verifier(epsilon=2.0)


class Drawn(Proposer):
    """Draws one token behind the text, from the same three each time."""

    name = "drawn"

    def propose(self, views):
        drafts = []
        for view in views:
            assert view["draws"]
            draft = Draft([len(view["tokens"]) % 3 + 1])
            draft.draw = "with_replacement"
            draft.set_candidates(0, {1: 0.25, 2: 0.25, 3: 0.5})
            drafts.append(draft)
        return drafts


class Reader(Verifier):
    """What rows and drafts give a verifier in Python."""

    name = "reader"
    guarantee = "same_distribution"
    needs_distributions = True
    needs_probabilities = True
    seen = 0

    def verify(self, draft, rows):
        if len(draft) > 0:
            assert draft.candidates_of(0) == {1: 0.25, 2: 0.25, 3: 0.5}
            assert draft.draw == "with_replacement"
            np.testing.assert_allclose(rows.distribution(1, tiny.VOCAB_SIZE).sum(), 1.0, rtol=1e-5)
            self.seen += 1
        rows.emit(0, rows.sample(0))


def test_a_python_verifier_sees_what_was_drawn(model):
    asks = ragged(3, tiny.VOCAB_SIZE)
    plain = run(make_engine(model, prefix_cache=False), asks)
    reader = Reader()
    speculation = Speculation([Drawn()], verify=reader, controller=4).build()
    drafted = run(make_engine(model, prefix_cache=False, speculation=speculation), asks)
    assert [a.tokens for a in drafted] == [a.tokens for a in plain]
    assert reader.seen > 50

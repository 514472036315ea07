"""Drafts by models that are speculated themselves, leave where it pays, read less of the prompt, or
are kept by a rule of their own."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import effinfer
from effinfer import SamplingParams, _core
from effinfer.checkpoints.model_files import open_model
from effinfer.speculation import Speculation, SpeculationWarning
from effinfer.techniques import (
    DEL,
    RAPID,
    BiLD,
    DraftModel,
    EarlyExit,
    EasySpec,
    SkipLayers,
    StagedDraft,
)
from effinfer.techniques.drawn_chain import TransferVerifier
from effinfer.techniques.exit_choice import best_exit
from effinfer.techniques.graph_steps import GraphSteps
from effinfer.techniques.rapid import shorten
from effinfer.techniques.staged import look_up
from effinfer.testing import make_model, make_twin
from tests.model_files import smollm2_path
from tests.techniques.test_speculation import EDIT

TOKENS = np.random.default_rng(5).integers(3, 290, 40).tolist()
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, its twin of three times the layers, another of the same vocabulary."""
    folder = tmp_path_factory.mktemp("models")
    model = make_model("llama-tiny", folder / "model.gguf")
    return {
        "model": model,
        "twin": make_twin(model, folder / "twin.gguf", depth=3),
        "stranger": make_model("llama-tiny", folder / "stranger.gguf", seed=1),
        "vocabulary": make_model("llama-tiny", folder / "vocabulary.gguf", vocab=310),
    }


def generate(model: Path, params: SamplingParams = GREEDY, **options: Any) -> Any:
    with effinfer.LLM(model, max_seq_len=256, **options) as llm:
        return llm.generate([TOKENS], params)[0]


def with_proposer(model: Path, proposer: Any, params: SamplingParams = GREEDY) -> Any:
    return generate(model, params, speculation=Speculation([proposer], controller=8))


def test_steps_of_a_graph_are_those_of_the_engine(models: dict[str, Path]) -> None:
    files = open_model(models["model"])
    with effinfer.LLM(models["model"]) as llm:
        expected = llm.logits(TOKENS, phase="decode")
    steps = GraphSteps.of(files, files.graph, 128)
    text = steps.begin()
    np.testing.assert_array_equal(steps.feed(text, TOKENS[:9], rows=9), expected[:9])
    # Tokens that are taken back leave nothing behind.
    steps.feed(text, [7, 8, 9])
    fresh = steps.follow(text, TOKENS[:14])
    assert fresh == TOKENS[9:14]
    np.testing.assert_array_equal(steps.feed(text, fresh, rows=2), expected[12:14])
    assert steps.follow(text, TOKENS[:14]) == TOKENS[13:14]
    np.testing.assert_array_equal(steps.feed(text, TOKENS[13:14])[0], expected[13])
    with pytest.raises(effinfer.OutOfMemoryError):
        steps.feed(steps.begin(), [5] * 200)
    steps.end(text)


def test_a_staged_draft_changes_nothing_and_takes_fewer_steps(models: dict[str, Path]) -> None:
    expected = generate(models["twin"])
    for name in ("model", "stranger"):
        recipe = StagedDraft(models[name], length=7, guesses=4)
        staged = recipe.for_target(open_model(models["twin"]))
        output = with_proposer(models["twin"], staged)
        assert output.token_ids == expected.token_ids
        assert staged.drafted > 20
        if name == "model":
            assert output.metrics.speculation.accepted >= 35
    assert generate(models["twin"], draft_model=recipe).token_ids == expected.token_ids
    for wrong in ({"length": 0}, {"guesses": -1}, {"max_tokens": 1.5}):
        with pytest.raises(effinfer.InvalidArgumentError, match=r"\[StagedDraft\]"):
            generate(models["twin"], draft_model=StagedDraft(models["model"], **wrong))
    with pytest.raises(effinfer.InvalidArgumentError, match="token 298 is"):
        generate(models["twin"], draft_model=StagedDraft(models["vocabulary"]))


def test_n_grams_speculate_a_real_draft_model() -> None:
    """SmolLM2 drafts for itself: a text that it has read before takes it fewer steps."""
    files, counts = open_model(smollm2_path()), {}
    for guesses in (0, 4):
        staged = StagedDraft(smollm2_path(), length=8, guesses=guesses).for_target(files)
        speculation = Speculation([staged], controller=8)
        with effinfer.LLM(smollm2_path(), max_seq_len=512, speculation=speculation) as llm:
            output = llm.generate([EDIT], GREEDY)[0]
        counts[guesses] = (output.token_ids, staged.drafted, staged.draft_steps)
    assert counts[0][0] == counts[4][0]
    assert counts[0][1] == counts[0][2]  # a step a token
    assert counts[4][2] < 0.6 * counts[4][1]


def test_look_up_finds_the_latest_place() -> None:
    assert look_up([1, 2, 3, 4, 1, 2, 3, 5, 6, 1, 2, 3], 2) == [5, 6]
    assert look_up([9, 2, 3, 7, 1, 2, 3], 3) == [7, 1, 2]
    assert look_up([1, 2, 3, 1, 2, 3], 0) == []
    assert look_up([1, 2], 4) == look_up([5], 4) == []
    assert look_up([4, 4, 4, 4], 4) == [4]


def test_a_text_that_outgrows_the_draft_is_told_once(models: dict[str, Path]) -> None:
    recipe = StagedDraft(models["model"], length=4, max_tokens=64)
    with pytest.warns(SpeculationWarning, match="it goes on undrafted") as told:
        output = generate(models["twin"], draft_model=recipe, params=long_params())
    assert sum(issubclass(warning.category, SpeculationWarning) for warning in told) == 1
    assert output.token_ids == generate(models["twin"], params=long_params()).token_ids


def long_params() -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)


def test_exits_draft_and_learn_which_is_right(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def given_times(right: Any, seconds: Any, step_seconds: float, length: int) -> tuple[int, int]:
        assert all(s >= 0 for s in seconds)
        assert step_seconds >= 0
        return best_exit(right, [1e-3, 2e-3], 1.0, length)

    # Without a look at the clock: small models draft no faster than they verify.
    monkeypatch.setattr("effinfer.techniques.dynamic_exit.best_exit", given_times)
    expected = generate(models["twin"], params=long_params())
    exits = DEL([1, 2], length=5, every=2).for_target(open_model(models["twin"]))
    output = with_proposer(models["twin"], exits, params=long_params())
    assert output.token_ids == expected.token_ids
    assert exits.right[1] > 0.9  # the twin is its own first two layers
    assert output.metrics.speculation.accepted >= 80
    assert generate(models["twin"], draft_model=DEL([1])).token_ids == expected.token_ids[:48]
    for wrong, part in [([], "exits: expected one"), ([0], r"expected 1\.\.5"), ([9], "got 9")]:
        with pytest.raises(effinfer.InvalidArgumentError, match=part):
            generate(models["twin"], draft_model=DEL(wrong))
    with pytest.raises(effinfer.InvalidArgumentError, match=r"\[DEL\] every: expected at least 1"):
        generate(models["twin"], draft_model=DEL([1], every=0))


def test_a_look_counts_what_each_exit_would_have_said(models: dict[str, Path]) -> None:
    text = [*TOKENS, *generate(models["twin"]).token_ids[:8]]
    exits = DEL([1, 2]).for_target(open_model(models["twin"]))
    look = exits._look(exits.steps.begin(), text, text)
    assert look == text[-16:]
    for place, layer in enumerate((1, 2)):
        with effinfer.LLM(models["twin"], layers=EarlyExit(layer)) as llm:
            said = llm.logits(text).argmax(1)[-16:-1]
        share = np.mean(said == text[-15:])
        # Both in their own arithmetic: one token may differ.
        assert exits.right[place] == pytest.approx(0.35 + 0.3 * share, abs=0.3 / 15 + 1e-9)
    assert exits.right[1] > exits.right[0]


def test_the_best_exit_has_the_most_tokens_a_second() -> None:
    # A free and perfect exit drafts all; one that is never right, or as slow as the step, none.
    assert best_exit([0.5, 1.0], [1e-9, 1e-9], 1.0, 6) == (1, 6)
    assert best_exit([0.0], [0.1], 1.0, 6) == (0, 0)
    assert best_exit([0.9], [1.0], 1.0, 6)[1] == 0
    # By hand: 1 + 0.8 (1 + 0.5) = 2.2 tokens in 1 + 0.2 + 0.1 against 1.8 in 1.2 and 2.4 in 1.4.
    assert best_exit([0.5, 0.8], [0.1, 0.2], 1.0, 2) == (1, 2)
    assert best_exit([0.8, 0.8], [0.1, 0.2], 1.0, 2) == (0, 2)
    assert best_exit([0.5, 0.5], [0.0, 0.0], 0.0, 3) == (1, 3)
    # What was not measured yet is tried.
    assert best_exit([0.5, 0.5], [0.0, 0.1], 1.0, 3)[0] == 0


def test_layers_in_parallel_draft_for_a_twin() -> None:
    """EasySpec of SmolLM2 drafts for SmolLM2: most of it is right, and no text changes."""
    with effinfer.LLM(smollm2_path(), max_seq_len=512) as llm:
        expected = llm.generate([EDIT], GREEDY)[0].token_ids
    recipe = DraftModel(smollm2_path(), length=4, adaptive=False, layers=EasySpec(group=2))
    speculation = Speculation([], controller=4)
    options = {"max_seq_len": 512, "draft_model": recipe, "speculation": speculation}
    with effinfer.LLM(smollm2_path(), **options) as llm:
        output = llm.generate([EDIT], GREEDY)[0]
    assert output.token_ids == expected
    metrics = output.metrics.speculation
    assert 0.2 < metrics.accepted_at[0] / metrics.drafted_at[0] < 1


def test_several_candidates_are_accepted_more_often() -> None:
    """Multi-Candidate Speculative Decoding (arXiv:2401.06706), by SmolLM2 without some layers."""
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=40, ignore_eos=True)
        for seed in range(6)
    ]
    shares = []
    for width in (1, 4):
        draft = DraftModel(SkipLayers([9, 19]), length=2, width=width, adaptive=False)
        speculation = Speculation([], verify="rejection", controller=16)
        with effinfer.LLM(
            smollm2_path(), max_seq_len=256, draft_model=draft, speculation=speculation
        ) as llm:
            outputs = llm.generate(["The weather in the mountains"] * 6, params)
        metrics = [output.metrics.speculation for output in outputs]
        assert {m.guarantee for m in metrics} == {"same_distribution"}
        shares.append(sum(m.accepted_at[0] for m in metrics) / sum(m.steps for m in metrics))
    assert 0.2 < shares[0] < shares[1] <= 1


def test_a_little_decoder_writes_and_a_big_one_looks(models: dict[str, Path]) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    plain = generate(models["twin"], params)
    # A big model that takes back whatever is not certain, and a little one that is never sure.
    for options in ({"rollback": 0.0, "fallback": 0.0}, {"fallback": 1.0}):
        output = generate(models["twin"], params, draft_model=BiLD(models["stranger"], **options))
        assert output.token_ids == plain.token_ids
    # One that accepts all: behind the first token of each step the text is the little one's.
    recipe = BiLD(models["stranger"], fallback=0.0, rollback=1e9, length=5)
    output = generate(models["twin"], params, draft_model=recipe)
    metrics = output.metrics.speculation
    assert metrics.guarantee == "lossy"
    assert metrics.accepted == metrics.drafted >= 25
    text = output.token_ids
    with effinfer.LLM(models["stranger"]) as little:
        greedy = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        said = little.generate([[*TOKENS, text[0]]], greedy)[0].token_ids
    assert text[1:6] == said
    for wrong in ({"fallback": 1.5}, {"rollback": -1.0}, {"length": 0}):
        with pytest.raises(effinfer.InvalidArgumentError, match=r"\[BiLD\]"):
            generate(models["twin"], draft_model=BiLD(models["stranger"], **wrong))
    with pytest.raises(effinfer.InvalidArgumentError, match="speculation: expected None beside"):
        generate(models["twin"], draft_model=BiLD(models["stranger"]), speculation="auto")
    with pytest.raises(effinfer.InvalidArgumentError, match="token 298 is"):
        generate(models["twin"], draft_model=BiLD(models["vocabulary"]))


class Rows:
    """One row of a target, with given uniforms."""

    def __init__(self, p: np.ndarray, uniforms: tuple[float, float]) -> None:
        self.p, self.uniforms, self.emitted = p, uniforms, []

    def distribution(self, row: int, vocab_size: int) -> np.ndarray:
        return self.p.astype(np.float32)

    def uniform(self, draw: int) -> float:
        return self.uniforms[draw - 1]

    def sample(self, row: int) -> int:
        return -1

    def emit(self, row: int, token: int) -> bool:
        self.emitted.append(token)
        return False


@pytest.mark.parametrize("transfer", [0.0, 1.0, 4.0])
def test_accepted_tokens_have_the_moved_distribution(transfer: float) -> None:
    """All outcomes of one drafted token: the draws of the draft by their weight, those of the
    verifier on a grid, whose error is a step of the grid for each token."""
    p, q = np.array([0.5, 0.3, 0.15, 0.05]), {1: 0.7, 2: 0.2, 3: 0.1}
    dense = np.array([0.0, 0.7, 0.2, 0.1])
    expected = p * np.exp(transfer * (dense - p))
    expected /= expected.sum()
    verifier, size = TransferVerifier(transfer, 4), 40
    assert verifier.guarantee == ("lossy" if transfer else "same_distribution")
    found = np.zeros(4)
    for token, weight in q.items():
        for u1 in (np.arange(size) + 0.5) / size:
            for u2 in (np.arange(size) + 0.5) / size:
                draft = _core.Draft([token])
                draft.draw = "without_replacement"
                draft.set_candidates(0, q)
                rows = Rows(p, (u1, u2))
                verifier.verify(draft, rows)
                found[rows.emitted[0]] += weight / size**2
    np.testing.assert_allclose(found, expected, rtol=0, atol=2 / size)
    assert found[0] > 0  # a token that the draft cannot draw


def test_what_is_drawn_from_the_whole_prompt_is_accepted(models: dict[str, Path]) -> None:
    """The draft model is the target and reads all of a short prompt: p = q."""
    params = SamplingParams(temperature=0.8, top_k=8, seed=2, max_tokens=40, ignore_eos=True)
    recipe = RAPID(models["model"], length=4)
    output = generate(models["twin"], params, draft_model=recipe)
    metrics = output.metrics.speculation
    assert metrics.guarantee == "same_distribution"
    assert metrics.accepted >= 0.95 * metrics.drafted > 20
    assert generate(models["twin"], params, draft_model=recipe).token_ids == output.token_ids
    moved = generate(models["twin"], params, draft_model=RAPID(models["stranger"], transfer=9.0))
    assert moved.metrics.speculation.guarantee == "lossy"
    for wrong in ({"transfer": -1.0}, {"question": 0}, {"pieces": -1}):
        with pytest.raises(effinfer.InvalidArgumentError, match=r"\[RAPID\]"):
            generate(models["twin"], draft_model=RAPID(models["model"], **wrong))


def test_a_prompt_is_shortened_to_what_its_end_asks_for() -> None:
    rng = np.random.default_rng(0)
    body = rng.integers(10, 20, 640).tolist()  # common tokens
    for place in (3, 7):
        body[place * 64 + 5] = 100 + place
    question = [103, 11, 107, 12]
    prompt = [1, *body, *question]
    short = shorten(prompt, 2, len(question))
    assert short == [1, *body[192:256], *body[448:512], *question]
    assert shorten(prompt, 10, len(question)) == prompt
    assert shorten(prompt, 0, len(question)) == [1, *question]
    assert shorten([5], 2, 64) == [5]

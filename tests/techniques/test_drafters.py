"""Drafts by small trained parts of the byte-level target in examples/pair: they say what it says
next, and change no text."""

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
import pytest

import effinfer
from effinfer import SamplingParams
from effinfer.checkpoints.model_files import open_model
from effinfer.speculation import Speculation, SpeculationWarning
from effinfer.techniques import (
    ADED,
    EESD,
    M2R2,
    PARD,
    PPD,
    BiTA,
    Chimera,
    DenseStore,
    DReSD,
    GliDe,
    HiddenTransfer,
    Kangaroo,
    LongSpec,
    Lookahead,
    ParallelSpec,
    PaSS,
    SuffixDecoding,
    TokenRecycling,
)
from effinfer.techniques.extra_rows import RowGroups
from effinfer.techniques.graph_copy import GraphCopy
from effinfer.techniques.graph_steps import GraphSteps
from effinfer.techniques.thompson import ThompsonLength
from effinfer.techniques.trained_parts import TrainedParts

EXAMPLES = Path(__file__).parents[2] / "examples"
TARGET = EXAMPLES / "pair" / "target.gguf"
FOLDER = EXAMPLES / "drafters"


def file_of(kind: str) -> Path:
    return FOLDER / f"{kind}.gguf"


# A recipe, nodes that a draft gets, and the share of first nodes that come true at temperature 0.7,
# at least: two thirds of what was measured on more texts (docs/techniques.md); extra rows are nodes
# here too.
METHODS: dict[str, tuple[Any, int, float]] = {
    "kangaroo": (Kangaroo(file_of("kangaroo"), length=4, adaptive=False), 4, 0.3),
    "m2r2": (M2R2(file_of("m2r2"), length=4, adaptive=False), 4, 0.3),
    "pard": (PARD(file_of("pard"), mask=256), 4, 0.5),
    "parallel_spec": (ParallelSpec(file_of("parallel_spec")), 4, 0.2),
    "pass": (PaSS(file_of("pass")), 8, 0.06),
    "ppd": (PPD(file_of("ppd")), 24, 0.06),
    "bita": (BiTA(file_of("bita")), 40, 0.03),
    "hidden_transfer": (HiddenTransfer(file_of("hidden_transfer")), 3, 0.18),
    "chimera": (Chimera(file_of("chimera"), length=4, width=1, adaptive=False), 4, 0.26),
    "glide": (GliDe(file_of("glide")), 5, 0.24),
    "long_spec": (LongSpec(file_of("long_spec")), 5, 0.23),
}


@functools.cache
def prompts() -> list[str]:
    """Of the text that the recipe held out."""
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    rest = text[-len(text) // 20 :]
    return [rest[i * 1400 : i * 1400 + 60] for i in range(8)]


PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=72, ignore_eos=True, logprobs=1),
    *[SamplingParams(temperature=0.7, seed=i, max_tokens=72, ignore_eos=True) for i in range(7)],
]


def generate(**options: Any) -> Sequence[effinfer.RequestOutput]:
    with effinfer.LLM(TARGET, max_seq_len=256, prefix_cache=False, **options) as llm:
        return llm.generate(prompts(), PARAMS)


@pytest.fixture(scope="module")
def plain() -> Sequence[effinfer.RequestOutput]:
    return generate()


def check_same(
    outputs: Sequence[effinfer.RequestOutput], plain: Sequence[effinfer.RequestOutput]
) -> None:
    for got, expected in zip(outputs, plain, strict=True):
        assert got.token_ids == expected.token_ids
        assert got.logprobs == expected.logprobs
        assert got.metrics.speculation.refused_drafts == 0


def first_share(outputs: Sequence[effinfer.RequestOutput]) -> float:
    metrics = [output.metrics.speculation for output in outputs]
    drafted = sum(m.drafted_at[0] for m in metrics)
    assert drafted > 50
    return sum(m.accepted_at[0] for m in metrics) / drafted


@pytest.mark.parametrize("kind", METHODS)
def test_drafts_come_true_and_change_nothing(
    kind: str, plain: Sequence[effinfer.RequestOutput]
) -> None:
    recipe, nodes, floor = METHODS[kind]
    outputs = generate(draft_model=recipe, speculation=Speculation([], controller=nodes))
    check_same(outputs, plain)
    assert first_share(outputs[1:]) > floor


@pytest.mark.parametrize("kind", METHODS)
def test_rows_by_cost_change_nothing(kind: str, plain: Sequence[effinfer.RequestOutput]) -> None:
    check_same(generate(draft_model=METHODS[kind][0]), plain)


def test_all_files_are_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.glob("*.gguf")) < 2e6


# ---- behind the first layers --------------------------------------------------------------------


def test_thompson_sampling_finds_the_length(plain: Sequence[effinfer.RequestOutput]) -> None:
    outputs = generate(draft_model=EESD(file_of("eesd"), length=8))
    check_same(outputs, plain)
    assert first_share(outputs[1:]) > 0.3
    lengths = [sum(o.metrics.speculation.drafted_at) for o in outputs]
    assert min(lengths) > 20
    # What is always right is drafted at its full length, what never is hardly beyond one token.
    for right, least, most in ((True, 7.0, 8.0), (False, 1.0, 1.5)):
        control = ThompsonLength(8)
        for _ in range(60):
            draft = effinfer.speculation.Draft([1] * control.budget({}))
            accepted = range(len(draft.tokens)) if right else []
            control.observe({}, [{"verified": draft, "accepted": list(accepted)}])
        drawn = [control.budget({}) for _ in range(200)]
        assert least <= np.mean(drawn) <= most
    kept = control.choose([], [effinfer.speculation.Draft([1, 2, 3])] * 2, {"draft_rows": 4})
    assert kept == [[0, 1, 2], [0]]


@pytest.mark.parametrize("recipe", [Kangaroo, M2R2, EESD])
def test_an_exit_computes_what_was_trained(
    recipe: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft's graph against the recipe's own arithmetic in float32, with the file's weights."""
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(FOLDER))
    from kinds import KINDS
    from model import Target, Weights, norm

    target = open_model(TARGET)
    exit_ = recipe(file_of(recipe.kind))
    parts = TrainedParts(exit_.path, exit_.kind, target)
    weights = parts.beside(target.weights)
    copy = GraphCopy(target, weights, "exit")
    own = f"{exit_.kind}.output_norm.weight" if exit_.own_norm else ""
    graph = copy.finish(exit_.leave(copy, parts.fact("exit")), own)
    ids = np.random.default_rng(0).integers(32, 120, 40)
    steps = GraphSteps.of(target, graph, 64, weights=weights)
    got = steps.feed(steps.begin(), ids.tolist(), len(ids))

    drafter = KINDS[exit_.kind](Target(Weights(TARGET)))
    with torch.no_grad():
        for name, value in drafter.weights().items():
            value.copy_(torch.from_numpy(parts.file.dequantize(name)))
        stream, wanted = drafter.stream(torch.from_numpy(ids)[None])
        last = drafter.own["output_norm"] if exit_.own_norm else drafter.target.norm
        expected = (norm(stream, last) @ drafter.target.table.T)[0].numpy()
    # Activations are rounded to 8 bits before each product: 1 part in 254, of some ten products.
    scale = np.abs(expected).max()
    assert np.abs(got - expected).max() < 0.05 * scale
    assert np.mean(got.argmax(1) == expected.argmax(1)) > 0.9


def test_parts_are_of_one_kind_and_model(tmp_path: Path) -> None:
    from effinfer.testing import make_model

    with pytest.raises(effinfer.InvalidArgumentError, match="expected kind eesd, got kangaroo"):
        generate(draft_model=EESD(file_of("kangaroo")))
    for wrong in ({"mask": 257}, {"mask": 256, "length": 0}):
        with pytest.raises(effinfer.InvalidArgumentError, match=r"\[PARD\]"):
            generate(draft_model=PARD(file_of("pard"), **wrong))
    other = make_model("llama-tiny", tmp_path / "other.gguf")
    for recipe, _, _ in METHODS.values():
        with pytest.raises(effinfer.InvalidArgumentError, match="expected (hidden|the voc)"):
            effinfer.LLM(other, draft_model=recipe)
    with pytest.raises(effinfer.FileError):
        generate(draft_model=Kangaroo(tmp_path / "nothing.gguf"))
    with pytest.raises(effinfer.FormatError, match=r"heads\.kind"):
        generate(draft_model=Kangaroo(TARGET))


# ---- several tokens from one step ---------------------------------------------------------------


def test_extra_ids_are_no_tokens() -> None:
    prompt = list(b"The statement")
    with effinfer.LLM(TARGET) as llm:
        expected = llm.logits(prompt)
    recipe = PPD(file_of("ppd"))
    for verify in ("match", "rejection"):
        # Who asks for distributions gets none of their rows, and says so.
        told = pytest.warns(SpeculationWarning, match="expected a token id in 0..256, got 257")
        speculation = Speculation([], verify=verify, controller=24)
        with effinfer.LLM(TARGET, draft_model=recipe, speculation=speculation) as llm:
            np.testing.assert_array_equal(llm.logits(prompt), expected)
            with pytest.raises(effinfer.InvalidArgumentError, match=r"token ids in 0\.\.256"):
                llm.generate([[*prompt, 257]], max_tokens=2)
            with told if verify == "rejection" else nullcontext():
                (output,) = llm.generate([prompt], temperature=0.0, max_tokens=20, ignore_eos=True)
        assert (output.metrics.speculation.refused_drafts > 0) == (verify == "rejection")
        assert max(output.token_ids) < 257


@pytest.mark.parametrize("recipe", [PaSS, PPD, BiTA])
def test_extra_rows_say_what_they_were_trained_to_say(
    recipe: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step's group guesses against the recipe's own arithmetic in float32."""
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(FOLDER))
    from kinds import KINDS
    from model import Rows, Target, Weights

    guesses: list[tuple[list[int], list[int]]] = []

    class Listening(RowGroups):
        def observe(self, facts: list[dict[str, Any]]) -> None:
            super().observe(facts)
            said = [token for token, _ in self._next[facts[0]["request"]]]
            guesses.append((facts[0]["tokens"].tolist(), said))

    monkeypatch.setattr("effinfer.techniques.extra_rows.RowGroups", Listening)
    speculation = Speculation([], controller=40)
    draft = recipe(file_of(recipe.kind))
    with effinfer.LLM(TARGET, draft_model=draft, speculation=speculation) as llm:
        llm.generate(prompts()[:1], temperature=0.7, seed=1, max_tokens=60, ignore_eos=True)
    drafter = KINDS[recipe.kind](Target(Weights(TARGET)))
    parts = TrainedParts(draft.path, recipe.kind, open_model(TARGET))
    right, count, whole = 0, 0, [pair for pair in guesses if len(pair[1]) == parts.count]
    assert len(whole) > 10
    with torch.no_grad():
        rows_of_group = torch.from_numpy(parts.array("rows"))
        for tokens, said in whole:
            ids = torch.tensor([tokens[:-1]])  # the last token was drawn in this step
            rows = Rows(ids.shape[1], torch.tensor([ids.shape[1] - 1]), len(rows_of_group))
            x = rows.append(drafter.target.table[ids], rows_of_group)
            states = drafter.target.run(x, rows.positions, rows.mask)[-1]
            expected = drafter.target.logits(states)[0, -parts.count :].argmax(-1).tolist()
            right += sum(a == b for a, b in zip(said, expected, strict=True))
            count += len(said)
    assert right > 0.85 * count


def test_extra_rows_and_matches_in_the_text_draft_together(
    plain: Sequence[effinfer.RequestOutput],
) -> None:
    """Other proposers see rows whose ids are no tokens."""
    others = [SuffixDecoding(), TokenRecycling(), ADED(), Lookahead()]
    speculation = Speculation(others, controller=40)
    check_same(generate(draft_model=PPD(file_of("ppd")), speculation=speculation), plain)


# ---- states -------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [ParallelSpec, HiddenTransfer, GliDe])
def test_a_text_that_outgrows_the_states_is_told_once(recipe: type[Any]) -> None:
    kind = {ParallelSpec: "parallel_spec", HiddenTransfer: "hidden_transfer", GliDe: "glide"}
    draft = recipe(file_of(kind[recipe]), max_tokens=64)
    params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    with effinfer.LLM(TARGET) as llm:
        expected = llm.generate(["The"], params)[0].token_ids
    speculation = Speculation([], controller=4)
    with (
        effinfer.LLM(TARGET, draft_model=draft, speculation=speculation) as llm,
        pytest.warns(SpeculationWarning, match="it goes on undrafted") as told,
    ):
        assert llm.generate(["The"], params)[0].token_ids == expected
    assert sum(issubclass(warning.category, SpeculationWarning) for warning in told) == 1


# ---- retrieval ----------------------------------------------------------------------------------


def test_neighbours_of_a_state_go_on_alike(plain: Sequence[effinfer.RequestOutput]) -> None:
    tokenizer = open_model(TARGET).tokenizer()
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics)[:6])
    store = DenseStore.of_texts(TARGET, [tokenizer.encode(text[:12000]), [65]])
    speculation = Speculation([], controller=12)
    outputs = generate(draft_model=DReSD(store, length=4, width=2), speculation=speculation)
    check_same(outputs, plain)
    assert first_share(outputs[1:]) > 0.2
    check_same(generate(draft_model=DReSD(store, least=1.1)), plain)  # drafts nothing


def test_a_store_finds_what_followed() -> None:
    rng = np.random.default_rng(0)
    states = rng.standard_normal((50, 12)).astype(np.float32)
    tokens = rng.integers(0, 5, 50)
    store = DenseStore.of_states(tokens.tolist(), states, dims=12)
    for entry in (3, 20, 48):
        (place, cosine), *others = store.find(states[entry], int(tokens[entry]), 3)
        assert place == entry + 1
        assert cosine == pytest.approx(1.0, abs=1e-4)
        assert all(c <= cosine and tokens[p - 1] == tokens[entry] for p, c in others)
    assert store.find(states[0], 99, 3) == []
    for wrong in ({"tokens": [1], "states": states[:1]}, {"dims": 13}, {"tokens": [1, 2]}):
        options = {"tokens": tokens.tolist(), "states": states, **wrong}
        with pytest.raises(effinfer.InvalidArgumentError, match=r"\[DReSD\]"):
            DenseStore.of_states(**options)
    with pytest.raises(effinfer.InvalidArgumentError, match=r"\[DReSD\] store"):
        generate(draft_model=DReSD(store))
    with pytest.raises(effinfer.InvalidArgumentError, match=r"\[DReSD\] length"):
        generate(draft_model=DReSD(store, length=0))

"""Parts of speculation written in Python: verifiers, controllers, and what goes wrong in them."""

import gc
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import effinfer
from effinfer import LLM, SamplingParams, _core
from effinfer.speculation import (
    Draft,
    DraftController,
    Proposer,
    Speculation,
    SpeculationWarning,
    Verifier,
)
from effinfer.techniques import SPECULATIONS, PromptLookup, SuffixDecoding, TokenRecycling
from tests.reference import tiny

PROMPTS = [[1, 2, 3, 1, 2], list(range(60)), [7], [9, 8] * 20]
PARAMS = [
    SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=20 + 5 * i, ignore_eos=True)
    for i in range(4)
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(tiny.FAMILIES["llama"], tmp_path_factory.mktemp("m") / "tiny.gguf")


@pytest.fixture(scope="module")
def plain(path: Path) -> list[list[int]]:
    return tokens_of(load(path, None))


def load(path: Path, speculation: Any, **options: Any) -> LLM:
    return LLM(path, threads=2, prefix_cache=False, speculation=speculation, **options)


def tokens_of(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]


class Last(Proposer):
    """Drafts the last token again, three times."""

    name = "last"

    def __repr__(self) -> str:  # of names of tests, which are the same in all processes
        return "Last()"

    def propose(self, views: list[dict[str, Any]]) -> list[Any]:
        return [Draft([int(view["tokens"][-1])] * 3) for view in views]


class Faulty(Last):
    """Goes wrong for the second request only, or for all."""

    def __init__(self, wrong: Any, method: str = "propose") -> None:
        self.wrong, self.method, self.victim = wrong, method, 2

    def propose(self, views: list[dict[str, Any]]) -> list[Any]:
        if self.method == "answer":
            return self.wrong(views)
        drafts = super().propose(views)
        for i, view in enumerate(views):
            if self.method == "propose" and view["request"] == self.victim:
                drafts[i] = self.wrong()
        return drafts

    def observe(self, facts: list[dict[str, Any]]) -> None:
        if self.method == "observe":
            self.wrong()

    def forget(self, request: int) -> None:
        if self.method == "forget":
            self.wrong()


def fail() -> Any:
    raise KeyError("out of ideas")


def caught(llm: LLM) -> tuple[list[effinfer.RequestOutput], list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        outputs = llm.generate(PROMPTS, PARAMS)
    return outputs, [m for m in messages if m.category is SpeculationWarning]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Draft([259]), "token id in 0..258, got 259"),
        (lambda: Draft([-1]), "token id"),
        (lambda: Draft([1, 2], [-1, 1]), "an earlier node as parent"),
        (lambda: Draft([1], [-2]), "an earlier node as parent"),
        (lambda: Draft([1], scores=[float("nan")]), r"a score in \[0, 1\]"),
        (lambda: Draft([1], scores=[float("inf")]), "a score"),
        (lambda: Draft([1, 2], scores=[0.5]), "as many parents and scores"),
        (lambda: Draft([1] * 64), "at most"),
    ],
)
def test_a_wrong_draft_concerns_its_request(path, plain, wrong, message):
    outputs, messages = caught(load(path, Speculation([Faulty(wrong)], controller=8)))
    assert [output.token_ids for output in outputs] == plain
    assert len(messages) == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(str(messages[0].message))
    assert str(messages[0].message).startswith("[speculation] last: ")
    counts = [output.metrics.speculation for output in outputs]
    assert counts[1].refused_drafts > 1 and counts[1].drafted == 0
    assert all(c.refused_drafts == 0 and c.drafted > 0 for c in (counts[0], *counts[2:]))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda views: fail(), "KeyError: 'out of ideas'"),
        (lambda views: None, "last.propose: "),
        (lambda views: 3, "last.propose: "),
        (lambda views: [], "drafts, got 0"),
        (lambda views: [None] * (len(views) + 1), "drafts, got"),
        (lambda views: ["draft"] * len(views), "last.propose: "),
    ],
)
def test_a_wrong_answer_concerns_who_was_asked_for(path, plain, wrong, message):
    outputs, messages = caught(load(path, Speculation([Faulty(wrong, "answer")], controller=8)))
    assert [output.token_ids for output in outputs] == plain
    assert len(messages) == len(PROMPTS)  # one a request
    assert all(message in str(m.message) for m in messages)
    assert all(output.metrics.speculation.refused_drafts > 1 for output in outputs)


@pytest.mark.parametrize("method", ["observe", "forget"])
def test_a_proposer_that_breaks_is_told_of_once(path, plain, method):
    both = [Faulty(fail, method), SuffixDecoding()]
    llm = load(path, Speculation(both, controller=8))
    outputs, messages = caught(llm)
    assert [output.token_ids for output in outputs] == plain
    assert 1 <= len(messages) <= len(PROMPTS)
    assert "out of ideas" in str(messages[0].message)
    assert "it is not asked again" in str(messages[0].message)
    assert sum(o.metrics.speculation.refused_drafts for o in outputs) == len(messages)
    assert caught(llm)[1] == []


def test_the_warning_names_the_callers_line(path):
    lines = Path(__file__).read_text().splitlines()
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        proposer = Faulty(lambda: Draft([-1]))
        load(path, Speculation([proposer], controller=8)).generate(PROMPTS, PARAMS)
        proposer.victim = 1
        stream = load(path, Speculation([proposer], controller=8)).stream(PROMPTS[0], PARAMS[0])
        for _ in stream:
            pass
    found = [m for m in messages if m.category is SpeculationWarning]
    assert [m.filename for m in found] == [__file__] * 2
    assert ".generate(PROMPTS, PARAMS)" in lines[found[0].lineno - 1]
    assert "for _ in stream" in lines[found[1].lineno - 1]


def test_none_and_slow_proposers_draft_nothing_and_lose_nothing(path, plain):
    class Slow(Last):
        def propose(self, views: list[dict[str, Any]]) -> list[Any]:
            time.sleep(0.002)
            return [None] * len(views)

    outputs, messages = caught(load(path, Slow()))
    assert [output.token_ids for output in outputs] == plain
    assert messages == []
    assert all(output.metrics.speculation.drafted == 0 for output in outputs)


class Rejection(Verifier):
    """Leviathan et al. 2023: a draft is kept with the probability that the model gives it; what
    replaces a refused one comes from the others."""

    guarantee = "same_distribution"
    needs_distributions = True

    def verify(self, draft: Draft, rows: _core.TokenRows) -> None:
        node = -1
        while True:
            row = node + 1
            p = rows.distribution(row, tiny.VOCAB_SIZE).astype(np.float64)
            nodes = range(len(draft))
            guess = next((i for i in nodes if draft.parents[i] == node), None)
            if guess is not None and rows.uniform(1) < p[draft.tokens[guess]]:
                if not rows.emit(row, draft.tokens[guess]):
                    return
                node = guess
                continue
            if guess is not None:
                p[draft.tokens[guess]] = 0.0
            token = np.searchsorted(np.cumsum(p) / p.sum(), rows.uniform(2), side="right")
            rows.emit(row, int(token))
            return


def test_a_rejection_verifier_keeps_the_distribution(path):
    """Of the first token behind a draft that is right every third time: against plain decoding's
    own probabilities, by a chi-squared test of 400 draws."""
    llm = load(path, Speculation([Last()], verify=Rejection(), controller=3), max_sequences=128)
    assert "rejection" not in llm.explain() and "same_distribution" in llm.explain()
    count, prompt = 400, [5, 6, 7]
    params = [
        SamplingParams(temperature=0.5, top_k=4, seed=s, max_tokens=3, ignore_eos=True, logprobs=0)
        for s in range(count)
    ]
    outputs = llm.generate([prompt] * count, params)
    assert sum(output.metrics.speculation.accepted for output in outputs) > 0
    firsts = [output.token_ids[0] for output in outputs]
    expected = np.exp(llm.logits(prompt)[-1].astype(np.float64) / 0.5)
    best = np.argsort(expected)[-4:]
    expected = expected[best] / expected[best].sum() * count
    drawn = np.array([firsts.count(token) for token in best])
    assert drawn.sum() == count
    assert ((drawn - expected) ** 2 / expected).sum() < 20  # 3 degrees of freedom: p < 2e-4
    for output in outputs[:20]:
        for token, step in zip(output.token_ids[:1], output.logprobs[:1], strict=True):
            logits = llm.logits(prompt)[-1].astype(np.float64)
            logprob = logits[token] - np.log(np.exp(logits).sum())
            assert abs(step.logprob - logprob) < 0.1  # decoding's arithmetic is another one


@pytest.mark.parametrize("token", [-1, tiny.VOCAB_SIZE, 2**31 - 1])
def test_a_verifier_that_emits_nonsense_ends_its_requests(path, token):
    class Nonsense(Rejection):
        def verify(self, draft: Draft, rows: _core.TokenRows) -> None:
            rows.emit(0, token)

    class Silent(Rejection):
        def verify(self, draft: Draft, rows: _core.TokenRows) -> None:
            self.kept = rows

    for verifier, message in ((Nonsense(), "emitted token"), (Silent(), "at least one token")):
        llm = load(path, Speculation([TokenRecycling()], verify=verifier))
        outputs = llm.generate(PROMPTS, PARAMS)
        assert {output.finish_reason for output in outputs} == {"error"}
        assert all(message in output.error for output in outputs)
    with pytest.raises(effinfer.InvalidArgumentError, match=r"expected a call of verify\(\)"):
        verifier.kept.sample(0)


class Greedy(DraftController):
    """Everything gets a row, as far as there are any."""

    wrong: Any = None

    def budget(self, view: dict[str, Any]) -> int:
        return 5

    def choose(self, views, drafts, step):
        return self.wrong() if self.wrong else [list(range(len(draft))) for draft in drafts]


def test_a_controller_in_python(path, plain):
    seen: list[dict[str, Any]] = []

    class Watching(Greedy):
        def observe(self, step: dict[str, Any], facts: list[dict[str, Any]]) -> None:
            seen.append({**step, "requests": len(facts)})

    outputs, messages = caught(load(path, Speculation([Last()], controller=Watching())))
    assert [output.token_ids for output in outputs] == plain
    assert messages == []
    drafted = sum(output.metrics.speculation.drafted for output in outputs)
    assert sum(step["draft_rows"] for step in seen) == drafted > 0
    assert all(step["seconds"] > 0 for step in seen)


@pytest.mark.parametrize("wrong", [fail, lambda: None, lambda: [[0]] * 9, lambda: [[77]] * 4])
def test_a_controller_that_fails_is_told_of(path, plain, wrong):
    controller = Greedy()
    controller.wrong = wrong
    outputs, messages = caught(load(path, Speculation([Last()], controller=controller)))
    assert [output.token_ids for output in outputs] == plain
    assert 1 <= len(messages) <= len(PROMPTS)
    assert "controller controller: " in str(messages[0].message)
    assert sum(output.metrics.speculation.drafted for output in outputs) == 0


def test_threads_share_a_python_proposer(path, plain):
    shared = Last()
    llms = [load(path, Speculation([shared], controller=4)) for _ in range(2)]
    results: dict[int, list[list[list[int]]]] = {}

    def work(index: int) -> None:
        results[index] = [tokens_of(llms[index % 2]) for _ in range(3)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [results[i] for i in range(4)] == [[plain] * 3] * 4


def test_a_native_part_is_of_one_model(path):
    part = _core.suffix_proposer()
    first = load(path, Speculation([part]))
    with pytest.raises(effinfer.InvalidArgumentError, match="is in use"):
        load(path, Speculation([part]))
    del first
    gc.collect()
    load(path, Speculation([part]))


def test_a_model_may_go_while_its_streams_run(path, plain):
    llm = load(path, Last())
    stream = llm.stream(PROMPTS[0], PARAMS[0])
    next(stream)
    other = llm.stream(PROMPTS[1], PARAMS[1])
    next(other)
    del llm, other
    gc.collect()
    for _ in stream:
        pass
    assert stream.output().token_ids == plain[0]


def test_a_request_may_decline_drafts(path, plain):
    params = [PARAMS[0], SamplingParams(**{**vars(PARAMS[1]), "speculation": False})]
    outputs = load(path, Speculation([Last()], controller=4)).generate(PROMPTS[:2], params)
    assert [output.token_ids for output in outputs] == plain[:2]
    assert outputs[0].metrics.speculation.drafted > 0
    assert outputs[1].metrics.speculation == type(outputs[1].metrics.speculation)()


@pytest.mark.parametrize("name", [None, "off", *SPECULATIONS])
def test_names(path, plain, name):
    llm = load(path, name)
    assert tokens_of(llm) == plain
    assert ("speculation:" in llm.explain()) is (name not in (None, "off"))
    if name not in (None, "off"):
        assert "verifier match: same_text" in llm.explain()
        assert "controller cost" in llm.explain()
        assert "Python" not in llm.explain()


def test_explain_names_what_runs_in_python(path):
    class Duck:
        def propose(self, views: list[dict[str, Any]]) -> list[None]:
            return [None] * len(views)

    text = load(path, Speculation([Duck(), Last(), PromptLookup()], controller=Greedy())).explain()
    assert "proposer Duck (Python: called once a step)" in text
    assert "proposer last (Python: called once a step)" in text
    assert "controller controller (Python: called once a step)" in text
    assert "PromptLookup(longest=3, shortest=2, length=8)\n" in text


@pytest.mark.parametrize(
    "wrong",
    [
        "fast",
        True,
        3,
        [SuffixDecoding()],
        SuffixDecoding,
        Speculation(SuffixDecoding()),
        Speculation("auto"),
        Speculation([SuffixDecoding]),
        Speculation([3]),
        Speculation([SuffixDecoding()] * 9),
        Speculation([Last()], verify="exact"),
        Speculation([Last()], verify=None),
        Speculation([Last()], verify=3),
        Speculation([Last()], controller="free"),
        Speculation([Last()], controller=None),
        Speculation([Last()], controller=True),
        Speculation([Last()], controller=0),
        Speculation([Last()], controller=64),
        Speculation([Last()], controller=10**20),
        Speculation([Last()], controller=2.5),
        PromptLookup(longest="3"),
        PromptLookup(length=10**12),
        TokenRecycling(width=33),
        TokenRecycling(width=None),
        SuffixDecoding(corpus=[-2]),
        SuffixDecoding(corpus=5),
        SuffixDecoding(shared_tokens=-1),
    ],
    ids=str,
)
def test_wrong_values_are_refused(path, wrong):
    with pytest.raises(effinfer.InvalidArgumentError, match=r"speculation|\[tokens\] corpus"):
        load(path, wrong)


def test_values_of_a_wrong_type(path):
    class Wrong(Last):
        top_k = "8"

    with pytest.raises(effinfer.InvalidArgumentError, match="top_k: expected an integer"):
        load(path, Speculation([Wrong()]))
    with pytest.raises(effinfer.InvalidArgumentError, match="scores"):
        Draft([1], scores="high")
    assert Draft([1]).child(-7, 1) == Draft([1]).child(2**31 - 1, 1) == -1


def test_the_highest_logits_are_seen(path):
    class Watching(Last):
        top_k = 10**6  # more than there are
        shapes: set[tuple[int, int]] = set()

        def observe(self, facts: list[dict[str, Any]]) -> None:
            for fact in facts:
                values, tokens = fact["top_values"], fact["top_tokens"]
                rows = 1 if fact["verified"] is None else 1 + len(fact["verified"])
                assert values.shape == tokens.shape and values.shape[0] == rows
                assert (np.diff(values, axis=1) <= 0).all()
                assert len(set(tokens[0].tolist())) == values.shape[1]
                self.shapes.add(values.shape)

    outputs, messages = caught(load(path, Speculation([Watching()], controller=4)))
    assert messages == []
    assert {shape[0] for shape in Watching.shapes} >= {1, 4}
    assert sum(output.metrics.speculation.drafted for output in outputs) > 0

"""Published ways to draft, on a real model: each finds what it is made for; no text changes."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import effinfer
from effinfer import SamplingParams
from effinfer.speculation import Speculation
from effinfer.techniques import (
    ADED,
    SPECULATIONS,
    CodeSwift,
    Lookahead,
    MultiSample,
    PromptLookup,
    SuffixDecoding,
    TokenRecycling,
)
from effinfer.techniques.preparation import as_speculation
from tests.model_files import smollm2_path

ROOT = Path(__file__).parents[2]
SOURCE = """def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)


def variance(values):
    center = mean(values)
    total = 0.0
    for value in values:
        total += (value - center) ** 2
    return total / len(values)
"""
EDIT = f"{SOURCE}\n\n# The same functions again, without changes:\n\ndef mean(values):\n"
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)


def load(speculation: Any, **options: Any) -> effinfer.LLM:
    return effinfer.LLM(
        smollm2_path(), max_seq_len=512, prefix_cache=False, speculation=speculation, **options
    )


def generate(
    llm: effinfer.LLM, prompts: Sequence[str], params: Sequence[SamplingParams]
) -> tuple[list[list[int]], int, int]:
    """Tokens, and how many nodes were drafted and accepted."""
    outputs = llm.generate(list(prompts), list(params))
    metrics = [output.metrics.speculation for output in outputs]
    return (
        [output.token_ids for output in outputs],
        sum(m.drafted for m in metrics),
        sum(m.accepted for m in metrics),
    )


@pytest.fixture(scope="module")
def plain() -> effinfer.LLM:
    return load(None)


@pytest.mark.parametrize(
    ("proposer", "least"),
    [
        (SuffixDecoding(), 30),
        (PromptLookup(), 30),
        (TokenRecycling(), 3),
        (ADED(), 3),
        (Lookahead(), 1),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else "",
)
def test_drafts_of_an_edit_are_accepted_and_change_nothing(
    plain: effinfer.LLM, proposer: Any, least: int
) -> None:
    expected, drafted, _ = generate(plain, [EDIT], [GREEDY])
    assert drafted == 0
    # A fixed number of nodes, so that the count does not depend on what rows cost here.
    tokens, drafted, accepted = generate(
        load(Speculation([proposer], controller=16)), [EDIT], [GREEDY]
    )
    assert tokens == expected
    assert drafted > 0
    assert accepted >= least


@pytest.mark.parametrize("name", SPECULATIONS)
def test_names_leave_greedy_and_sampled_texts_as_they_are(plain: effinfer.LLM, name: str) -> None:
    prompts = [EDIT, "Once upon a time"]
    params = [GREEDY, SamplingParams(temperature=0.9, seed=3, max_tokens=32, ignore_eos=True)]
    assert generate(load(name), prompts, params)[0] == generate(plain, prompts, params)[0]


def test_a_corpus_and_earlier_texts_are_found(plain: effinfer.LLM) -> None:
    prompt = "def mean(values):\n"
    params = [SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)]
    (text,), _, _ = generate(plain, [prompt], params)
    corpus = [*plain.tokenize(prompt), *text]
    for proposer in (CodeSwift(corpus), SuffixDecoding(corpus=corpus)):
        tokens, _, accepted = generate(
            load(Speculation([proposer], controller=8)), [prompt], params
        )
        assert tokens == [text]
        assert accepted >= 20
    shared = load(Speculation([SuffixDecoding(shared_tokens=4096)], controller=8))
    first = generate(shared, [prompt], params)
    second = generate(shared, [prompt], params)
    assert first[0] == second[0] == [text]
    assert second[2] > first[2]


def test_files_become_a_corpus(plain: effinfer.LLM, tmp_path: Path) -> None:
    paths = [tmp_path / "a.py", tmp_path / "b.py"]
    for path in paths:
        path.write_text(SOURCE)
    corpus = CodeSwift.of_files(paths, plain.tokenize).corpus
    assert list(corpus) == [*plain.tokenize(SOURCE), -1] * 2


def test_samples_of_one_prompt_draft_from_each_other(plain: effinfer.LLM) -> None:
    prompts = ["The three laws of robotics are"] * 4
    params = [
        SamplingParams(temperature=0.4, seed=seed, max_tokens=96, ignore_eos=True)
        for seed in range(4)
    ]
    tokens, _, alone = generate(
        load(Speculation([SuffixDecoding()], controller=8)), prompts, params
    )
    beside, _, accepted = generate(
        load(Speculation([MultiSample()], controller=8)), prompts, params
    )
    assert tokens == beside == generate(plain, prompts, params)[0]
    assert accepted > alone


def test_a_batch_is_ragged_and_its_budget_shared(plain: effinfer.LLM) -> None:
    """BASS (arXiv:2404.15778), EMS-SD (arXiv:2405.07542), EXSPEC (arXiv:2510.22876): requests of a
    batch accept different numbers of tokens without padding, and their texts stay right."""
    prompts = [EDIT, "Once upon a time", EDIT[:200], "1, 2, 3, 4, 5, 6, 7, 8,"]
    params = [
        SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (40, 9, 25, 33)
    ]
    llm = load(Speculation([SuffixDecoding()], controller=6))
    outputs = llm.generate(prompts, params)
    expected, _, _ = generate(plain, prompts, params)
    assert [output.token_ids for output in outputs] == expected
    accepted = {output.metrics.speculation.accepted for output in outputs}
    assert len(accepted) > 1


def test_depths_are_counted() -> None:
    output = load(Speculation([SuffixDecoding()], controller=8)).generate([EDIT], GREEDY)[0]
    metrics = output.metrics.speculation
    assert sum(metrics.drafted_at) == metrics.drafted
    assert sum(metrics.accepted_at) == metrics.accepted
    assert all(a <= d for a, d in zip(metrics.accepted_at, metrics.drafted_at, strict=True))
    assert metrics.accepted + metrics.steps <= len(output.token_ids)


def test_the_example_of_the_page_runs(plain: effinfer.LLM) -> None:
    page = (ROOT / "docs/speculation.md").read_text()
    example = next(
        block
        for block in re.findall(r"```python\n(.*?)```", page, re.S)
        if "class Bigrams" in block
    )
    assert len(example.strip().splitlines()) <= 34
    scope: dict[str, Any] = {}
    exec(example.replace('"smollm2-135m"', f"{str(smollm2_path())!r}, max_seq_len=512"), scope)
    llm = scope["llm"]
    output = llm.generate([EDIT], GREEDY)[0]
    assert [output.token_ids] == generate(plain, [EDIT], [GREEDY])[0]
    assert "bigrams (Python: called once a step)" in llm.explain()


def test_names_and_wrong_values() -> None:
    assert as_speculation(None) is None
    assert as_speculation("off") is None
    assert as_speculation(SuffixDecoding()) == Speculation([SuffixDecoding()])
    for wrong in ("fast", 3, object()):
        with pytest.raises(effinfer.InvalidArgumentError, match=r"\[LLM\] speculation: expected"):
            as_speculation(wrong)
    wrong = (
        PromptLookup(longest=1),
        TokenRecycling(width=0),
        Lookahead(length=1),
        CodeSwift([1 << 30]),
    )
    for proposer in wrong:
        with pytest.raises(effinfer.InvalidArgumentError, match=r"\[speculation\]"):
            load(proposer)

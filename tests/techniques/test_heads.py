"""The trained heads in examples/heads: they say what SmolLM2 says next, and change no text."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

import effinfer
from effinfer import SamplingParams
from effinfer.speculation import Speculation
from effinfer.techniques import Eagle, Hydra, Medusa, SuffixDecoding
from effinfer.techniques.heads import Heads
from tests.model_files import smollm2_path

FOLDER = Path(__file__).parents[2] / "examples" / "heads"
# Of drafts of the next token, the share that comes true, at least: those here have 17 to 26 %
# (docs/speculation.md), the most frequent token alone 4 to 6 %.
KINDS: list[tuple[type[Heads], float]] = [
    (Medusa, 0.09),
    (Hydra, 0.17),
    (Eagle, 0.13),
]
OPENINGS = [
    "The lighthouse keeper had not spoken to anyone in weeks when",
    "To plan a vegetable garden for a small balcony, begin with",
    "In the second half of the nineteenth century, railways changed",
    "A good teacher of music knows that",
]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=128, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=0.8, seed=1, max_tokens=128, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=0.8, seed=2, max_tokens=128, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, top_p=0.9, max_tokens=128, ignore_eos=True),
]


def heads(kind: type[Heads], **options: object) -> Heads:
    return kind(FOLDER / f"{kind.kind}.gguf", **options)  # type: ignore[arg-type]


def load(speculation: Speculation | None) -> effinfer.LLM:
    return effinfer.LLM(
        smollm2_path(), max_seq_len=512, prefix_cache=False, speculation=speculation
    )


@pytest.fixture(scope="module")
def plain() -> Sequence[effinfer.RequestOutput]:
    with load(None) as llm:
        return llm.generate(OPENINGS, PARAMS)


def test_what_heads_read_changes_no_bit_of_the_model(isa: str) -> None:
    prompt, one = OPENINGS[0], SamplingParams(temperature=0.0, max_tokens=1, logprobs=0)
    found = []
    for drafts in (None, Speculation([heads(Medusa)])):
        with load(drafts) as llm:
            found.append(llm.generate([prompt], one)[0].logprobs)
    assert found[0] == found[1]


def test_all_weights_are_small() -> None:
    sizes = [(FOLDER / f"{kind.kind}.gguf").stat().st_size for kind, _ in KINDS]
    assert sum(sizes) < 2e6


@pytest.mark.parametrize(("kind", "floor"), KINDS, ids=lambda value: getattr(value, "kind", ""))
def test_heads_predict_and_change_nothing(
    plain: Sequence[effinfer.RequestOutput], kind: type[Heads], floor: float
) -> None:
    drafts = Speculation([heads(kind, width=1, adaptive=False)], controller=3)
    with load(drafts) as llm:
        outputs = llm.generate(OPENINGS, PARAMS)
    for got, expected in zip(outputs, plain, strict=True):
        assert got.token_ids == expected.token_ids
        assert got.logprobs == expected.logprobs
    metrics = [output.metrics.speculation for output in outputs]
    drafted = sum(m.drafted_at[0] for m in metrics)
    accepted = sum(m.accepted_at[0] for m in metrics)
    assert drafted > 80
    assert accepted >= floor * drafted
    # More than twice what the best single token would have.
    counts = Counter(token for output in outputs for token in output.token_ids)
    total = sum(len(output.token_ids) for output in outputs)
    assert accepted / drafted > 2 * counts.most_common(1)[0][1] / total


@pytest.mark.parametrize("kind", [kind for kind, _ in KINDS], ids=lambda kind: kind.kind)
def test_trees_and_batches_by_cost_change_nothing(
    plain: Sequence[effinfer.RequestOutput], kind: type[Heads]
) -> None:
    with load(Speculation([heads(kind, width=3)])) as llm:
        outputs = llm.generate(OPENINGS * 2, PARAMS * 2)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain] * 2


def test_heads_and_matches_in_the_text_draft_together(
    plain: Sequence[effinfer.RequestOutput],
) -> None:
    """TokenSwift (arXiv:2502.18890): heads, and n-grams of what was generated."""
    with load(Speculation([heads(Hydra), SuffixDecoding()], controller=6)) as llm:
        outputs = llm.generate(OPENINGS, PARAMS)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]


def test_heads_are_of_one_model() -> None:
    from tests.model_files import gemma3_path

    with pytest.raises(effinfer.InvalidArgumentError, match="hidden_size 640, got 576"):
        effinfer.LLM(gemma3_path(), draft_model=heads(Medusa))

"""Methods that call one LLM or two: SpecReason, RSD, Skeleton-of-Thought; on SmolLM2 and Gemma 3,
whose vocabularies differ."""

from collections.abc import Iterator

import pytest

import effinfer
from effinfer import SamplingParams
from effinfer.techniques import RSD, SkeletonOfThought, SpecReason
from tests.model_files import gemma3_path, smollm2_path

PROMPT = "Question: A farmer has 3 cows and buys 4 more. How many cows are there?\n\nAnswer: "
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[effinfer.LLM, effinfer.LLM]]:
    with (
        effinfer.LLM(gemma3_path(), max_seq_len=1024) as large,
        effinfer.LLM(smollm2_path(), max_seq_len=1024) as small,
    ):
        yield large, small


def test_rewards_say_who_writes(pair: tuple[effinfer.LLM, effinfer.LLM]) -> None:
    large, small = pair
    asked: list[tuple[str, str, str]] = []

    def reward(prompt: str, text: str, step: str) -> float:
        asked.append((prompt, text, step))
        return float(len(asked) % 2)

    both = RSD(large, small, reward, step_tokens=6).generate(PROMPT, PARAMS)
    assert both.accepted == [i % 2 == 0 for i in range(len(both.accepted))]
    assert len(both.accepted) >= 3
    assert both.small_tokens + both.large_tokens == 20
    assert both.refused_tokens > 0
    # Each judge sees what was written before it.
    assert all(prompt == PROMPT and both.text.startswith(text) for prompt, text, _ in asked)
    assert both.text.startswith(asked[0][2])

    for mark, llm in ((1.0, small), (0.0, large)):
        alone = RSD(large, small, lambda *_, mark=mark: mark, step_tokens=6)
        output = alone.generate(PROMPT, PARAMS)
        assert (output.small_tokens == 0) == (mark == 0)
        text, left = "", 20
        while left > 0:
            stop = SamplingParams(
                temperature=0.0, max_tokens=min(6, left), ignore_eos=True, stop="\n\n"
            )
            step = llm.generate([PROMPT + text], stop)[0]
            left -= len(step.token_ids)
            text += step.text + ("\n\n" if step.finish_reason == "stop" else "")
        assert output.text == text


def test_rewards_may_be_probabilities(pair: tuple[effinfer.LLM, effinfer.LLM]) -> None:
    large, small = pair
    always = RSD(large, small, lambda *_: 0.5, weight=lambda reward: 2 * reward)
    never = RSD(large, small, lambda *_: 0.5, weight=lambda reward: 0.0)
    assert all(always.generate(PROMPT, PARAMS, max_tokens=8).accepted)
    assert not any(never.generate(PROMPT, PARAMS, max_tokens=8).accepted)


def test_the_large_model_marks_steps(pair: tuple[effinfer.LLM, effinfer.LLM]) -> None:
    large, small = pair
    all_kept = SpecReason(large, small, threshold=0, step_tokens=6).generate(PROMPT, PARAMS)
    assert all(all_kept.accepted)
    assert all_kept.large_tokens == 0
    assert all(score in range(10) for score in all_kept.scores)
    # A threshold above the mark of the first step leaves it to the large model.
    mark = all_kept.scores[0]
    assert mark < 9
    strict = SpecReason(large, small, threshold=mark + 1, step_tokens=6)
    assert not strict.generate(PROMPT, PARAMS).accepted[0]


def test_a_text_ends_where_a_model_or_a_stop_says(
    pair: tuple[effinfer.LLM, effinfer.LLM],
) -> None:
    large, small = pair
    rsd = RSD(large, small, lambda *_: 1.0)
    free = rsd.generate(PROMPT, PARAMS)
    word = free.text.split()[2]
    stopped = rsd.generate(PROMPT, PARAMS, stop=word)
    assert stopped.finish_reason == "stop"
    assert stopped.text == free.text[: free.text.index(word)]
    assert rsd.generate(PROMPT, PARAMS, max_tokens=5).finish_reason == "length"


def test_wrong_values_are_refused(pair: tuple[effinfer.LLM, effinfer.LLM]) -> None:
    large, small = pair
    for options in ({"threshold": 10}, {"threshold": float("nan")}, {"separator": ""}):
        with pytest.raises(effinfer.InvalidArgumentError, match=r"\[SpecReason\]"):
            SpecReason(large, small, **options)
    for reward, options in ((None, {}), (len, {"threshold": 2}), (len, {"step_tokens": 0})):
        with pytest.raises(effinfer.InvalidArgumentError, match=r"\[RSD\]"):
            RSD(large, small, reward, **options)
    with pytest.raises(effinfer.InvalidArgumentError, match=r"reward: expected 0 to 1, got 3"):
        RSD(large, small, lambda *_: 3.0).generate(PROMPT, PARAMS)
    with pytest.raises(effinfer.InvalidArgumentError):
        RSD(large, small, lambda *_: 1.0).generate(PROMPT, PARAMS, max_tokns=3)
    for wrong in ({"most_points": 0}, {"skeleton_tokens": 1.5}):
        with pytest.raises(effinfer.InvalidArgumentError, match=r"\[SkeletonOfThought\]"):
            SkeletonOfThought(large, **wrong)


def test_points_of_a_skeleton_are_written_together(
    pair: tuple[effinfer.LLM, effinfer.LLM],
) -> None:
    _, small = pair
    writer = SkeletonOfThought(small, most_points=4)
    output = writer.generate("How do I learn to swim?", temperature=0.0, max_tokens=24)
    assert 2 <= len(output.points) <= 4
    assert len(output.skeleton) == len(output.points) == len(output.point_tokens)
    for point, begun in zip(output.points, output.skeleton, strict=True):
        assert point.startswith(begun)
    assert output.points != output.skeleton
    assert output.text == "\n".join(output.points)
    assert all(1 <= count <= 24 for count in output.point_tokens)

"""The arithmetic and the texts of the section `speculation`."""

import sys
from pathlib import Path

import pytest

from effinfer import LLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

import speculation  # noqa: E402
import speculation_texts as texts  # noqa: E402

COSTS = {1: 1.0, 2: 1.1, 4: 1.3, 8: 2.1}


def run(seconds: float, steps: int, draft_steps: int, drafted: int, tokens: int) -> dict:
    drafts = {str(1 + drafted // draft_steps): draft_steps} if draft_steps else {}
    return {
        "seconds": seconds,
        "by_rows": {"1": steps - draft_steps, **drafts},
        "steps": steps,
        "rows": steps + drafted,
        "drafted": drafted,
        "accepted": tokens - 1 - steps,
        "tokens": [[0] * tokens],
    }


@pytest.mark.parametrize(
    ("rows", "seconds"), [(1, 1.0), (1.5, 1.05), (2, 1.1), (3, 1.2), (8, 2.1), (12, 2.9)]
)
def test_times_between_measured_numbers_of_rows(rows, seconds):
    assert speculation.at_rows(COSTS, rows) == pytest.approx(seconds)


def test_a_prediction_is_of_the_steps_that_were():
    # 4 plain steps and 4 of 4 rows gave 16 tokens.
    drafted = run(10.0, 8, 4, 12, 17)
    assert speculation.predicted(drafted, COSTS) == pytest.approx(16 / (4 + 4 * 1.3))
    assert speculation.predicted(run(9.0, 8, 0, 0, 9), COSTS) == 1.0


def test_gains_are_of_runs_that_followed_each_other():
    plain = [run(16.0, 16, 0, 0, 17), run(32.0, 16, 0, 0, 17)]
    drafted = [run(8.0, 8, 4, 12, 17), run(32.0, 8, 4, 12, 17)]
    found = speculation.gains(plain, drafted, [COSTS, COSTS])
    assert (found["ratio"]["min"], found["ratio"]["max"]) == (1.0, 2.0)
    assert found["tokens_a_step"] == 2.0 and found["rows_a_step"] == 2.5
    assert found["accepted"] == pytest.approx(8 / 12)
    assert found["share"]["max"] == pytest.approx(2.0 / (16 / 9.2))
    assert speculation.gains(plain, drafted, [])["predicted"] is None


def test_distinct_runs():
    assert texts.distinct_share(list(range(20))) == 1.0
    assert texts.distinct_share([1, 2, 3, 4] * 20) < 0.1


def test_an_edit_renames_everywhere():
    source = "int count = 0;  // the count\n" + "Count next(Count count);\n" * 20
    text = texts.edited(source, "count", "total")
    assert "count" not in text.lower()
    assert text.count("total, from line") == 2


def test_texts_are_no_loops_and_there_are_enough():
    llm = LLM("smollm2-135m", threads=1, max_seq_len=64)
    edits, summaries = texts.code_edits(llm, 100), texts.summaries(llm, 100)
    assert len(edits) >= 8 and len(summaries) >= 6
    for text in edits + summaries:
        assert texts.distinct_share(text.output) >= speculation.LEAST_DISTINCT
        assert len(text.prompt) + len(text.output) < speculation.CONTEXT
    assert {len(text.output) for text in edits} == {texts.CODE_TOKENS}
    assert all(len(text.prompt) >= texts.SUMMARY_PROMPT for text in summaries)

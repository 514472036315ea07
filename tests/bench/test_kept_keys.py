"""The measurements of bench/kept_keys.py, on a short text."""

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.model_files import smollm2_path

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import kept_keys
from kept_keys import CITIES, RandomKeys, Subject, number_of

TEXT = "A stream runs from the hills to the sea, and the wind comes back from it at night. " * 40
LENGTH = 300


@pytest.fixture(autouse=True)
def short(monkeypatch):
    for name, value in {"FORCED": 20, "TIMED": 4}.items():
        monkeypatch.setattr(kept_keys, name, value)


@pytest.fixture(scope="module")
def dense():
    return Subject(smollm2_path(), (), LENGTH)


def test_perplexity_is_that_of_the_text_behind_the_prompt(dense):
    tokens = dense.llm.tokenize(TEXT)
    tokens[310:320] = tokens[50:60]
    expected = dense.llm.log_likelihoods(tokens[:320])[-20:]
    # A prompt's arithmetic is another than that of generated tokens.
    assert dense.perplexity(tokens) == pytest.approx(np.exp(-expected.mean()), rel=0.05)


def test_facts_are_found_where_they_are_asked_for(dense):
    tokens = dense.llm.tokenize(TEXT)
    assert dense.facts(tokens, CITIES[:2]) == 2
    assert len({number_of(city) for city in CITIES}) == len(CITIES)


def test_methods_that_see_the_question_have_rows(monkeypatch):
    monkeypatch.setattr(kept_keys, "TOKENS", 1400)
    monkeypatch.setattr(kept_keys, "CITIES", CITIES[:1])
    monkeypatch.setattr(kept_keys, "SEEING", ("dense", "random keys"))
    rows = kept_keys.measure_facts(smollm2_path(), lambda size: (3 * TEXT)[:size])
    assert [row.split("|")[1].strip() for row in rows] == ["dense", "random keys"]
    assert all("of 1" in row for row in rows)


def test_turns_have_times_and_the_bytes_of_keys_that_stay(dense):
    tokens = dense.llm.tokenize(TEXT)
    random = Subject(smollm2_path(), (RandomKeys(budget=64),), LENGTH)
    for _ in range(2):  # each time another request
        pairs = list(zip(dense.turns(tokens, 3), random.turns(tokens, 3), strict=True))
        assert all(seconds > 0 for pair in pairs for seconds, _ in pair)
        # Pages, of 64 and some and of 300 and some slots.
        assert [few / every for (_, every), (_, few) in pairs] == [2 / 5] * 3
    assert not dense.engine.has_work() and not random.engine.has_work()

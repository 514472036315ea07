"""The measurements of bench/kept_keys.py, on a short text."""

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.model_files import smollm2_path
from tests.techniques.watching import watching

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import endless
import kept_keys
import key_methods
import kvpress_rows
import techniques
from kept_keys import CITIES, Subject, number_of
from key_methods import RandomKeys

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
    monkeypatch.setattr(kept_keys, "TOKENS", 800)
    monkeypatch.setattr(kept_keys, "CITIES", CITIES[:1])
    monkeypatch.setattr(kept_keys, "SEEING", ("dense", "random keys"))
    rows = kept_keys.measure_facts(smollm2_path(), lambda size: (3 * TEXT)[:size])
    assert [row.split("|")[1].strip() for row in rows] == ["dense", "random keys"]
    assert all("of 1" in row for row in rows)


def test_rows_are_those_that_are_asked_for():
    assert all(key_methods.is_wanted(label, ()) for label in ("dense", "`XKV` | 100 %"))
    assert key_methods.is_wanted("`XKV` | 100 %", ["quest", "xkv"])
    assert not key_methods.is_wanted("`Quest`, units of 16", ["quest`, units of 32"])


def test_methods_that_are_fitted_have_rows(dense, monkeypatch):
    """Fitted once, before anything is timed, and only where their row is asked for."""
    monkeypatch.setattr(kept_keys, "TOKENS", 800)
    monkeypatch.setattr(kept_keys, "CITIES", CITIES[:1])
    fitted = []
    for kind in (key_methods.CSKV, key_methods.XKV, key_methods.CommVQ):

        def calibrate(self, llm, text, plain=kind.calibrate):
            fitted.append((self.name, len(text)))
            return plain(self, llm, text)

        monkeypatch.setattr(kind, "calibrate", calibrate)
    monkeypatch.setattr(kept_keys, "FITTED", 2000)
    rows = kept_keys.measure(smollm2_path(), lambda size: (20 * TEXT)[:size], 1, ["`dense", "CSKV"])
    assert [row.split("|")[1].strip() for row in rows] == ["`CSKV`"]
    assert fitted == [("cskv", kept_keys.FITTED)]
    assert all("of 1 |" in row and "x |" in row for row in rows)


def test_a_predictor_and_clusters_have_rows(monkeypatch):
    monkeypatch.setattr(kept_keys, "LONG", 780)
    monkeypatch.setattr(kept_keys, "VISITED", 1 / 4)
    monkeypatch.setattr(kept_keys, "FITTED", 4000)
    wanted = ["`SqueezedAttention`", "`TokenButler`"]
    rows = kept_keys.measure_long(smollm2_path(), lambda size: (20 * TEXT)[:size], 1, wanted)
    assert [row.split("|")[1].strip() for row in rows] == wanted
    assert all(float(row.split("|")[3]) > 1 for row in rows)
    squeezed, butler = (float(row.split("|")[5].strip(" %")) for row in rows)
    assert squeezed == 100 and 120 < butler < 127  # seven layers more of thirty


def test_controls_drop_once_what_they_say(dense):
    tokens = dense.llm.tokenize(TEXT)
    seen = []

    def look(sequence):
        seen.append([sequence.keys(0), sequence.length])

    watch = [watching(look, name, when="every", tokens=1) for name in ("watch",)]
    method = kvpress_rows.FirstAndLast(budget=40)
    subject = Subject(smollm2_path(), (method, *watch), LENGTH)
    subject.perplexity(tokens)
    assert [length for _, length in seen[:3]] == [41, 42, 43]  # it goes on with what is generated
    plain = Subject(smollm2_path(), tuple(watch), LENGTH)
    seen.clear()
    plain.perplexity(tokens)
    assert seen[0][1] == LENGTH + 1
    mean = Subject(smollm2_path(), (kvpress_rows.MeanAttention(budget=40), *watch), LENGTH)
    seen.clear()
    mean.perplexity(tokens)
    assert [length for _, length in seen[:2]] == [41, 42]


def test_some_rows_are_printed_and_no_table_is_written(monkeypatch, capsys):
    monkeypatch.setattr(kept_keys, "measure", lambda *arguments: [f"| {arguments[-1]} |"])
    monkeypatch.setattr(techniques, "write", lambda *table: pytest.fail("a table was written"))
    techniques.main(["--table", "keys", "--row", "xkv"])
    written = []
    monkeypatch.setattr(techniques, "write", lambda table, lines: written.append((table, lines)))
    techniques.main(["--table", "keys"])
    assert written[0][0] == "keys" and written[0][1][-1] == "| [] |"


def test_a_text_without_an_end_keeps_its_pages(monkeypatch):
    short = {"KEPT": 200, "SLOTS": 1024, "NEAR": 500, "FAR": 1500, "TURNS": 2, "TIMED": 4}
    for name, value in short.items():
        monkeypatch.setattr(endless, name, value)
    rows = endless.measure(smollm2_path(), lambda size: TEXT)
    pages = [row.split("|")[3] for row in rows]
    assert pages[0] == pages[1] and float(pages[0].split()[0]) > 1
    assert [row.split("|")[1].strip() for row in rows] == ["500 tokens", "1,500 tokens"]


def test_turns_have_times_and_the_bytes_of_keys_that_stay(dense):
    tokens = dense.llm.tokenize(TEXT)
    random = Subject(smollm2_path(), (RandomKeys(budget=64),), LENGTH)
    for _ in range(2):  # each time another request
        pairs = list(zip(dense.turns(tokens, 3), random.turns(tokens, 3), strict=True))
        assert all(seconds > 0 for pair in pairs for seconds, _ in pair)
        # Pages, of 64 and some and of 300 and some slots.
        assert [few / every for (_, every), (_, few) in pairs] == [2 / 5] * 3
    assert not dense.engine.has_work() and not random.engine.has_work()

"""--speculate: the same text, and what drafts did for it."""

import json
from pathlib import Path

import pytest

from tests.cli.test_cli import effinfer
from tests.reference import tiny

REPEATING = "the cat and the hat, the cat and the hat, the cat and the"


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> Path:
    return tiny.write_gguf(tiny.FAMILIES["llama"], tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.mark.parametrize("name", ["auto", "suffix", "ngram", "recycling"])
def test_a_text_is_the_same_with_drafts(tiny_model, name):
    options = (
        "generate",
        "-m",
        tiny_model,
        REPEATING,
        "-n",
        24,
        "--seed",
        7,
        "--ignore-eos",
        "--json",
    )
    plain = json.loads(effinfer(*options).stdout)
    drafted = json.loads(effinfer(*options, "--speculate", name).stdout)
    assert drafted["token_ids"] == plain["token_ids"]
    assert plain["metrics"]["speculation"]["drafted"] == 0


def test_statistics_say_how_many_drafts_were_accepted():
    prompt = "Count: one two three four, one two three four, one two three four, one two"
    options = ("generate", prompt, "-n", 48, "--temperature", 0, "--ignore-eos")
    result = effinfer(*options, "--speculate", "auto")
    assert result.returncode == 0, result.stderr
    assert "drafts accepted in" in result.stderr
    plain = effinfer(*options)
    assert plain.stdout == result.stdout
    assert "drafts" not in plain.stderr


def test_chat_takes_it():
    options = ("chat", "Say hello.", "--temperature", 0, "-n", 12, "-q")
    assert effinfer(*options, "--speculate", "auto").stdout == effinfer(*options).stdout


def test_bench_measures_the_gain_on_a_text(tiny_model, tmp_path):
    text = tmp_path / "prompt.txt"
    text.write_text(REPEATING)
    options = ("--pp", 16, "--tg", 24, "--repeat", 2, "--threads", 1, "--prompt-file", text)
    result = effinfer("bench", "-m", tiny_model, *options, "--speculate", "auto", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])["speculation"]
    assert found["tokens"] == 24 and found["prompt_tokens"] > 10
    assert found["plain_tok_s"] > 0 and found["drafted_tok_s"] > 0 and found["gain"] > 0
    assert 0 <= found["accepted_a_step"] <= found["drafted_a_step"]
    depths = found["acceptance_by_depth"]
    assert [row["depth"] for row in depths] == sorted(row["depth"] for row in depths)
    assert all(0 <= row["accepted"] <= row["drafted"] for row in depths)


def test_bench_has_a_prompt_of_its_own():
    options = ("--pp", 16, "--tg", 40, "--repeat", 1, "--speculate", "suffix")
    result = effinfer("bench", *options)
    assert result.returncode == 0, result.stderr
    assert "with suffix" in result.stdout
    assert "depth  1" in result.stdout
    empty = effinfer("bench", "--speculate", "auto", "--prompt-file", "/nowhere/text")
    assert empty.returncode == 2


def test_without_it_nothing_drafts(tiny_model):
    options = ("--pp", 16, "--tg", 4, "--repeat", 1, "--threads", 1, "--json")
    result = effinfer("bench", "-m", tiny_model, *options, "--speculate", "off")
    assert "speculation" not in json.loads(result.stdout.splitlines()[-1])

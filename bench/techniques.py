"""Techniques beside dense attention on real models and text. Writes the tables of
docs/techniques.md: sparse prefills (time of a prompt, perplexity, a fact to find in it), and
methods of the keys that generated tokens read (kept_keys.py).

The text is the documentation that every Python carries (pydoc_data.topics).
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import endless
import kept_keys
import kvpress_rows
import numpy as np
from key_methods import is_wanted
from peers import PeerUnavailable

import effinfer
from effinfer.hub import resolve
from effinfer.techniques import PREFILLS, SparsePrefill

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "techniques.md"
# By the names of their markers: sparse prefills; keys that stay, with SmolLM2 behind two lengths of
# text, with Gemma, beside kvpress, and of a text without an end.
TABLES = ("measured", "keys", "long", "facts", "kvpress", "endless")
MODELS = ("smollm2-135m", "gemma3-270m")
LENGTHS = (4096, 8000)
DEPTHS = (0.2, 0.5, 0.8)
ANSWER = "48213"
FACT = f" The special magic number of the city of Lisbon is {ANSWER}. "
QUESTION = "\n\nThe special magic number of the city of Lisbon is"
HEADER = (
    "| model | tokens | prefill | time | against dense | perplexity | change | fact found |\n"
    "|-|-|-|-|-|-|-|-|"
)


def haystack(words: int) -> str:
    topics = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics))[:words]


class Subject:
    """One model with one way of prefill."""

    def __init__(self, model: str, prefill: str, length: int) -> None:
        self.name = prefill
        self.length = length
        self.path = resolve(model)
        self.llm = effinfer.LLM(
            self.path, prefill=prefill, max_seq_len=length + 64, prefix_cache=False
        )
        self.text = self.llm.tokenize(haystack(8 * length))
        self.seconds: list[float] = []

    def prefill(self) -> None:
        params = effinfer.SamplingParams(max_tokens=1, temperature=0.0)
        start = time.perf_counter()
        self.llm.generate([self.text[: self.length]], params)
        self.seconds.append(time.perf_counter() - start)

    def perplexity(self) -> float:
        """Of keys that are chosen in any case: log_likelihoods() takes steps of few rows, in which
        choosing would not pay."""
        llm = self.llm
        if self.name != "dense":
            method: Callable[..., SparsePrefill] = PREFILLS[self.name]
            llm = effinfer.LLM(
                self.path,
                prefill=method(min_tokens=0),
                max_seq_len=self.length + 64,
                prefix_cache=False,
            )
        return float(np.exp(-llm.log_likelihoods(self.text[: self.length]).mean()))

    def finds(self, depth: float) -> bool:
        fact = self.llm.tokenize(FACT, add_special=False)
        question = self.llm.tokenize(QUESTION, add_special=False)
        room = self.length - len(fact) - len(question)
        cut = int(depth * room)
        prompt = [*self.text[:cut], *fact, *self.text[cut:room], *question]
        params = effinfer.SamplingParams(max_tokens=10, temperature=0.0)
        return ANSWER in self.llm.generate([prompt], params)[0].text.replace(" ", "")


def measure(model: str, length: int, repeats: int, wanted: Collection[str]) -> list[str]:
    prefills = ("dense", *(name for name in PREFILLS if is_wanted(name, wanted)))
    subjects = [Subject(model, prefill, length) for prefill in prefills]
    perplexities = [subject.perplexity() for subject in subjects]  # warms up, too
    for repeat in range(repeats):
        for subject in subjects if repeat % 2 == 0 else reversed(subjects):
            subject.prefill()
    rows: list[str] = []
    exact: dict[str, Any] = {}
    for subject, perplexity in zip(subjects, perplexities, strict=True):
        seconds = statistics.median(subject.seconds)
        exact = exact or {"seconds": seconds, "perplexity": perplexity}
        found = sum(subject.finds(depth) for depth in DEPTHS)
        cells = [
            model,
            str(length),
            subject.name,
            f"{seconds:.2f} s",
            f"{exact['seconds'] / seconds:.2f}x",
            f"{perplexity:.3f}",
            f"{100 * (perplexity / exact['perplexity'] - 1):+.2f} %",
            f"{found} of {len(DEPTHS)}",
        ]
        rows.append("| " + " | ".join(cells) + " |")
        print(rows[-1], flush=True)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", help="default: " + ", ".join(MODELS))
    parser.add_argument("--length", type=int, action="append", help="tokens of a prompt")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--table", action="append", choices=TABLES, help="default: all")
    parser.add_argument(
        "--row",
        action="append",
        default=[],
        help="only methods with this in their label, which are printed; no table is written",
    )
    options = parser.parse_args(arguments)
    tables = options.table or TABLES
    store = no_table if options.row else write
    smollm2 = resolve("smollm2-135m")
    if "keys" in tables:
        rows = kept_keys.measure(smollm2, haystack, options.repeats, options.row)
        keys = f", {100 * kept_keys.SHARE:.0f} % of keys"
        where = kept_keys.where(kept_keys.TOKENS, options.repeats, keys)
        store("keys", [where, "", kept_keys.HEADER, *rows])
    if "long" in tables:
        rows = kept_keys.measure_long(smollm2, haystack, options.repeats, options.row)
        where = kept_keys.where(kept_keys.LONG, options.repeats)
        store("long", [where, "", kept_keys.LONG_HEADER, *rows])
    if "facts" in tables:
        rows = kept_keys.measure_facts(resolve("gemma3-270m"), haystack, options.row)
        store("facts", ["| Gemma 3 270M | facts found |", "|-|-|", *rows])
    if "endless" in tables:
        store("endless", [endless.where(), "", endless.HEADER, *endless.measure(smollm2, haystack)])
    if "measured" in tables:
        rows = [
            row
            for model in options.model or MODELS
            for length in options.length or LENGTHS
            for row in measure(model, length, options.repeats, options.row)
        ]
        facts = effinfer.info()
        where = f"{facts.threads} threads, {facts.isa}; medians of {options.repeats}, taking turns."
        store("measured", [where, "", HEADER, *rows])
    if "kvpress" in tables:
        try:
            rows = kvpress_rows.measure(smollm2, haystack, options.row)
            store("kvpress", [kvpress_rows.HEADER, *rows])
        except PeerUnavailable as error:
            print(f"kvpress: {error}; its table stays as it was.")


def no_table(table: str, lines: list[str]) -> None:
    """Of some rows: they would not be beside the others of their table."""


def write(table: str, lines: list[str]) -> None:
    begin, end = f"<!-- {table}: begin -->", f"<!-- {table}: end -->"
    before, rest = DOCUMENT.read_text(encoding="utf-8").split(begin)
    after = rest.split(end)[1]
    made = "\n".join([begin, "", *lines, "", end])
    DOCUMENT.write_text(before + made + after, encoding="utf-8")
    print(f"{DOCUMENT.name}: table {table} written", flush=True)


if __name__ == "__main__":
    main()

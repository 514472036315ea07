"""Methods that drop, merge, visit or encode keys, beside dense decoding and two controls with as
many keys, random ones and the first and the last: facts found, perplexity, time, bytes. Tables of
bench/techniques.py.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
from key_methods import Methods, controls, drawing, dropping, encoding, is_wanted, made, visiting

import effinfer
from effinfer import LLM, SamplingParams
from effinfer.techniques import Technique

TOKENS = 4000
LONG = 7750  # of a context of 8,192
SHARE = 0.2  # of the keys stay
VISITED = 1 / 8  # of the keys are visited by generated tokens
FORCED = 400  # tokens whose perplexity is taken
TIMED = 12  # tokens of a turn
FITTED = 16_384  # characters of a text that methods are fitted to
CITIES = (
    *("Lisbon", "Oslo", "Cairo", "Lima", "Dublin", "Athens", "Vienna"),
    *("Madrid", "Berlin", "Paris", "Rome", "Tokyo", "Delhi", "Moscow"),
    *("London", "Boston", "Sydney", "Geneva", "Havana", "Milan"),
)

LONG_HEADER = (
    "| method | keys | perplexity | time a token | bytes |\n"  #
    "|-|-|-|-|-|"
)
HEADER = (
    "| method | facts found | perplexity | time a token | bytes |\n"  #
    "|-|-|-|-|-|"
)
# Of those that drop keys, behind LONG tokens.
LONG_DROPPING = ("`SnapKV`", "`H2O`")
# What sees a question at the end of a prompt, and whom it is compared with.
SEEING = (
    *("dense", "random keys", "first and last keys"),
    *("`SnapKV`", "`SnapKV`, window 8"),
    *("`KVCompose`", "`KVCompose`, budgets by layer", "`WindowKV`"),
)


class Forced:
    """A constraint that lets one text through."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.at = tokens, 0

    def fill(self, mask: np.ndarray) -> None:
        token = self.tokens[min(self.at, len(self.tokens) - 1)]
        mask[:] = 0
        mask[token // 32] = np.uint32(1 << token % 32)

    def accept(self, token: int) -> bool:
        self.at += 1
        return True

    def rollback(self, count: int) -> None:
        self.at -= count

    def ended(self) -> bool:
        return False


class Subject:
    """A model with a method, and what its engine does for one request at a time, behind prompts of
    `length` tokens."""

    def __init__(
        self, path: Any, techniques: tuple[Technique, ...], length: int, **engine: Any
    ) -> None:
        self.length = length
        options: dict[str, Any] = {
            "techniques": list(techniques),
            "max_seq_len": length + FORCED + 32,
            **engine,
        }
        self.llm = LLM(path, **options)
        # Whose pages are a request's own.
        self.engine = LLM(path, **options, prefix_cache=False).engine

    def facts(self, text: list[int], cities: tuple[str, ...] = CITIES) -> int:
        """How many of the facts in a text are found when they are asked for at its end.
        A prompt's chunks are cached where the method lets them be."""
        facts = [self._tokens(f" The magic number of {c} is {number_of(c)}. ") for c in cities]
        asked = [self._tokens(f"\n\nThe magic number of {city} is") for city in cities]
        room = self.length - sum(map(len, facts)) - max(map(len, asked))
        document: list[int] = []
        for i, fact in enumerate(facts):
            document += text[i * room // len(facts) : (i + 1) * room // len(facts)] + fact
        params = SamplingParams(temperature=0.0, max_tokens=8)
        found = 0
        for city, question in zip(cities, asked, strict=True):
            answer = self.llm.generate([[*document, *question]], params)[0].text
            found += str(number_of(city)) in answer.replace(" ", "")
        return found

    def perplexity(self, text: list[int]) -> float:
        """Of tokens behind a prompt, one by one."""
        prompt, follows = text[: self.length], text[self.length :][:FORCED]
        params = SamplingParams(temperature=0.0, max_tokens=FORCED, ignore_eos=True, logprobs=0)
        self.engine.add(prompt, params.to_core(), Forced(follows))
        logprobs = [
            entry.logprob
            for outputs in iter(self._step, None)
            for output in outputs
            for entry in output.tokens
        ]
        return float(np.exp(-np.mean(logprobs)))

    def turns(self, text: list[int], count: int) -> Iterator[tuple[float, int]]:
        """`count` times the median time of TIMED generated tokens, and the bytes of the pages."""
        params = SamplingParams(temperature=0.0, max_tokens=TIMED * count + 8, ignore_eos=True)
        request = self.engine.add(text[: self.length], params.to_core())
        while not any(output.token_ids for output in self.engine.step()):
            pass
        for _ in range(count):
            seconds = []
            for _ in range(TIMED):
                start = time.perf_counter()
                self.engine.step()
                seconds.append(time.perf_counter() - start)
            yield statistics.median(seconds), self.engine.kv_cache.used_bytes
        self.engine.cancel(request)
        while self.engine.has_work():
            self.engine.step()

    def _step(self) -> Any:
        return self.engine.step() if self.engine.has_work() else None

    def _tokens(self, text: str) -> list[int]:
        return self.llm.tokenize(text, add_special=False)


def number_of(city: str) -> int:
    return 100 + sum(ord(letter) * (7 + i) for i, letter in enumerate(city)) * 37 % 900


def measure(
    path: Any, text: Callable[[int], str], repeats: int, wanted: Collection[str] = ()
) -> list[str]:
    """A row for each method, or for those that are wanted. Times come first, of all methods."""
    dense = Subject(path, (), TOKENS)
    tokens = dense.llm.tokenize(text(8 * TOKENS))
    chosen = methods(dense.llm, fitted_text(text), wanted)
    costs = costs_beside(dense, path, chosen, tokens, repeats)
    rows: list[str] = []
    for label, techniques in chosen.items():
        subject = Subject(path, techniques, TOKENS) if techniques else dense
        found = f"{subject.facts(tokens, CITIES)} of {len(CITIES)}"
        quality = f"{found} | {subject.perplexity(tokens):.3f}"
        rows.append(f"| {label} | {quality} | {costs[label]} |")
        print(rows[-1], flush=True)
    return rows


def fitted_text(text: Callable[[int], str]) -> str:
    """The end of all there is, far behind what is measured."""
    return text(1 << 30)[-FITTED:]


def methods(llm: LLM, text: str, wanted: Collection[str] = ()) -> Methods:
    """All at one budget of keys, that stay or that are visited, and those without one."""
    budget = round(SHARE * TOKENS)
    dense: Methods = {"dense": ()} if is_wanted("dense", wanted) else {}
    recipes = {
        **controls(budget, heads_of(llm)),
        **dropping(budget),
        # Questions are behind the context, whose keys are clustered once for all of them.
        **visiting(llm, budget, text, context=TOKENS - 64),
        **drawing(llm, text),
        **encoding(llm, text),
    }
    return dense | made(recipes, wanted)


def long_methods(llm: LLM, text: str, wanted: Collection[str] = ()) -> Methods:
    """By their labels and how many keys stay, are visited or are looked up."""
    kept, visited = round(SHARE * LONG), round(VISITED * LONG)
    some = {name: recipe for name, recipe in dropping(kept).items() if name in LONG_DROPPING}
    groups = {
        "100 %": encoding(llm, text),
        f"{100 * SHARE:.3g} %": {**controls(kept, heads_of(llm)), **some},
        f"{100 * VISITED:.3g} %": {
            **controls(visited, heads_of(llm)),
            **visiting(llm, visited, text),
        },
        "drawn": drawing(llm, text),
    }
    recipes = {
        f"{label} | {keys}": make for keys, group in groups.items() for label, make in group.items()
    }
    dense: Methods = {"dense | 100 %": ()} if is_wanted("dense | 100 %", wanted) else {}
    return dense | made(recipes, wanted)


def measure_long(
    path: Any, text: Callable[[int], str], repeats: int, wanted: Collection[str] = ()
) -> list[str]:
    """A row for each method behind LONG tokens, or for those that are wanted."""
    dense = Subject(path, (), LONG)
    tokens = dense.llm.tokenize(text(8 * LONG))
    chosen = long_methods(dense.llm, fitted_text(text), wanted)
    costs = costs_beside(dense, path, chosen, tokens, repeats)
    rows: list[str] = []
    for label, techniques in chosen.items():
        subject = Subject(path, techniques, LONG) if techniques else dense
        rows.append(f"| {label} | {subject.perplexity(tokens):.3f} | {costs[label]} |")
        print(rows[-1], flush=True)
    return rows


def heads_of(llm: LLM) -> int:
    """KV heads of the layers whose keys a method may drop."""
    facts = [node["attributes"] for node in llm.files.graph.nodes if node["op"] == "attention"]
    return sum(each["kv_heads"] for each in facts if each["window_left"] < 0)


def measure_facts(path: Any, text: Callable[[int], str], wanted: Collection[str] = ()) -> list[str]:
    """A row for each method that sees the question: how many facts it finds."""
    dense = Subject(path, (), TOKENS)
    tokens = dense.llm.tokenize(text(8 * TOKENS))
    labels = [label for label in SEEING if is_wanted(label, wanted)]
    budget = round(SHARE * TOKENS)
    recipes = {**controls(budget, heads_of(dense.llm)), **dropping(budget)}
    chosen = made({label: recipes[label] for label in labels if label in recipes}, ())
    rows: list[str] = []
    for label in labels:
        subject = Subject(path, chosen[label], TOKENS) if label in chosen else dense
        rows.append(f"| {label} | {subject.facts(tokens, CITIES)} of {len(CITIES)} |")
        print(rows[-1], flush=True)
    return rows


def costs_beside(
    dense: Subject,
    path: Any,
    chosen: Methods,
    tokens: list[int],
    repeats: int,
) -> dict[str, str]:
    """Cells of the time of a token and of bytes: of one request each, in turns with dense decoding
    of another."""
    costs: dict[str, str] = {}
    for label, techniques in chosen.items():
        subject = Subject(path, techniques, dense.length)
        turns = dense.turns(tokens, repeats), subject.turns(tokens, repeats)
        pairs = list(zip(*turns, strict=True))
        ratio = statistics.median(own[0] / plain[0] for plain, own in pairs)
        seconds = statistics.median(own[0] for _, own in pairs)
        share = pairs[-1][1][1] / pairs[-1][0][1]
        costs[label] = f"{1e3 * seconds:.2f} ms, {ratio:.2f}x | {100 * share:.0f} %"
        print(f"{label}: {costs[label]}", flush=True)
    print("What follows takes no times.", flush=True)
    return costs


def where(tokens: int, repeats: int, keys: str = "") -> str:
    facts = effinfer.info()
    return (
        f"SmolLM2, {tokens:,} tokens{keys}; {facts.threads} threads, {facts.isa}; medians of "
        f"{repeats} turns of {TIMED} tokens, each beside one of dense decoding."
    )

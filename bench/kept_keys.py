"""Methods that drop, merge, visit or encode keys, beside dense decoding and two controls with as
many keys, random ones and the first and the last: facts found, perplexity, time, bytes. A table of
bench/techniques.py.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

import effinfer
from effinfer import LLM, SamplingParams
from effinfer.techniques import (
    H2O,
    KIVI,
    Chelsea,
    Keyformer,
    KVCompose,
    Meta,
    Quest,
    SnapKV,
    StreamingLLM,
    SubGen,
    Technique,
    WindowKV,
    hook,
)

TOKENS = 4000
SHARE = 0.2  # of the keys stay
FORCED = 400  # tokens whose perplexity is taken
TIMED = 24
CITIES = (
    *("Lisbon", "Oslo", "Cairo", "Lima", "Dublin", "Athens", "Vienna"),
    *("Madrid", "Berlin", "Paris", "Rome", "Tokyo", "Delhi", "Moscow"),
    *("London", "Boston", "Sydney", "Geneva", "Havana", "Milan"),
)
HEADER = (
    "| method | facts found | perplexity | time a token | bytes |\n"  #
    "|-|-|-|-|-|"
)
# What sees a question at the end of a prompt, and whom it is compared with.
SEEING = (
    *("dense", "random keys", "first and last keys"),
    *("`SnapKV`", "`SnapKV`, window 8", "`KVCompose`", "`WindowKV`"),
)


@dataclass(frozen=True)
class RandomKeys(Technique):
    """A control: of a prompt random keys stay, for each KV head its own, and the last ones."""

    META: ClassVar[Meta] = Meta(
        paper="a control",
        arxiv="",
        family="kv.eviction",
        primitives=("residency", "hooks"),
        effect="approximate",
        exclusive=("kv.resident",),
        python_steps=True,
    )

    budget: int = 1024
    window: int = 32
    heads: int = 90  # of layers without a window

    @hook(when="prompt_end")
    def keep(self, event: Any, sequence: Any) -> None:
        size, rng = sequence.length, np.random.default_rng(7)
        if size <= self.budget:
            return
        free = size - self.window
        lists = [
            [
                *sorted(rng.choice(free, self.budget - self.window, False).tolist()),
                *range(free, size),
            ]
            for _ in range(self.heads)
        ]
        sequence.retain(lists)


def methods(budget: int, heads: int) -> dict[str, tuple[Technique, ...]]:
    """All at one budget of keys, but for KIVI, which has bits."""
    half = budget // 2
    return {
        "dense": (),
        "random keys": (RandomKeys(budget, heads=heads),),
        "first and last keys": (StreamingLLM(recent=budget - 4, reposition=False),),
        "`SnapKV`": (SnapKV(budget),),
        "`SnapKV`, window 8": (SnapKV(budget, window=8),),
        "`KVCompose`": (KVCompose(budget),),
        "`WindowKV`": (WindowKV(budget),),
        "`H2O`": (H2O(budget, recent=half),),
        "`Keyformer`": (Keyformer(budget, recent=half),),
        "`StreamingLLM`": (StreamingLLM(recent=budget - 4),),
        "`Chelsea`": (Chelsea(budget),),
        "`SubGen`": (SubGen(budget),),
        "`Quest`": (Quest(budget=budget),),
        "`KIVI`, 4 bits": (KIVI(bits=4),),
        "`KIVI`, 2 bits": (KIVI(bits=2),),
    }


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
    """A model with a method, and what its engine does for one request at a time."""

    def __init__(self, path: Any, techniques: tuple[Technique, ...]) -> None:
        methods = list(techniques)
        self.llm = LLM(path, techniques=methods, max_seq_len=TOKENS + 512)
        # Whose pages are a request's own.
        alone = LLM(path, techniques=methods, max_seq_len=TOKENS + 512, prefix_cache=False)
        self.engine = alone.engine

    def facts(self, text: list[int], cities: tuple[str, ...] = CITIES) -> int:
        """How many of the facts in a text of TOKENS are found when they are asked for at its end.
        A prompt's chunks are cached where the method lets them be."""
        facts = [self._tokens(f" The magic number of {c} is {number_of(c)}. ") for c in cities]
        asked = [self._tokens(f"\n\nThe magic number of {city} is") for city in cities]
        room = TOKENS - sum(map(len, facts)) - max(map(len, asked))
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
        """Of tokens behind TOKENS, one by one."""
        prompt, follows = text[:TOKENS], text[TOKENS : TOKENS + FORCED]
        params = SamplingParams(temperature=0.0, max_tokens=FORCED, ignore_eos=True, logprobs=0)
        self.engine.add(prompt, params.to_core(), Forced(follows))
        logprobs = [
            entry.logprob
            for outputs in iter(self._step, None)
            for output in outputs
            for entry in output.tokens
        ]
        return float(np.exp(-np.mean(logprobs)))

    def decode(self, text: list[int]) -> tuple[float, int]:
        """The median time of a generated token, and the bytes of its sequence's pages."""
        params = SamplingParams(temperature=0.0, max_tokens=TIMED, ignore_eos=True)
        self.engine.add(text[:TOKENS], params.to_core())
        seconds: list[float] = []
        used = 0
        while True:
            start = time.perf_counter()
            outputs = self._step()
            if outputs is None:
                break
            if outputs and outputs[0].token_ids:
                seconds.append(time.perf_counter() - start)
            if self.engine.has_work() and len(seconds) > TIMED // 2:
                used = self.engine.kv_cache.used_bytes
        return statistics.median(seconds[TIMED // 4 :]), used

    def _step(self) -> Any:
        return self.engine.step() if self.engine.has_work() else None

    def _tokens(self, text: str) -> list[int]:
        return self.llm.tokenize(text, add_special=False)


def number_of(city: str) -> int:
    return 100 + sum(ord(letter) * (7 + i) for i, letter in enumerate(city)) * 37 % 900


def measure(path: Any, text: Callable[[int], str], repeats: int) -> list[str]:
    """A row for each method. Times come first, of all methods; they are of pairs with dense
    decoding, taking turns."""
    dense = Subject(path, ())
    tokens = dense.llm.tokenize(text(8 * TOKENS))
    chosen = methods(round(SHARE * TOKENS), heads_of(dense.llm))
    costs: dict[str, str] = {}
    for label, techniques in chosen.items():
        subject = Subject(path, techniques) if techniques else dense
        costs[label] = cost_beside(dense, subject, tokens, repeats)
        print(f"{label}: {costs[label]}", flush=True)
    print("What follows takes no times.", flush=True)
    rows: list[str] = []
    for label, techniques in chosen.items():
        subject = Subject(path, techniques) if techniques else dense
        quality = f"{subject.facts(tokens)} of {len(CITIES)} | {subject.perplexity(tokens):.3f}"
        rows.append(f"| {label} | {quality} | {costs[label]} |")
        print(rows[-1], flush=True)
    return rows


def heads_of(llm: LLM) -> int:
    """KV heads of the layers whose keys a method may drop."""
    facts = [node["attributes"] for node in llm.files.graph.nodes if node["op"] == "attention"]
    return sum(each["kv_heads"] for each in facts if each["window_left"] < 0)


def measure_facts(path: Any, text: Callable[[int], str]) -> list[str]:
    """A row for each method that sees the question: how many facts it finds."""
    dense = Subject(path, ())
    tokens = dense.llm.tokenize(text(8 * TOKENS))
    chosen = methods(round(SHARE * TOKENS), heads_of(dense.llm))
    rows: list[str] = []
    for label in SEEING:
        subject = Subject(path, chosen[label]) if chosen[label] else dense
        rows.append(f"| {label} | {subject.facts(tokens)} of {len(CITIES)} |")
        print(rows[-1], flush=True)
    return rows


def cost_beside(dense: Subject, subject: Subject, tokens: list[int], repeats: int) -> str:
    """Cells of the time of a token and of bytes."""
    pairs = []
    for repeat in range(repeats):
        both = (dense, subject) if repeat % 2 == 0 else (subject, dense)
        first, second = (each.decode(tokens) for each in both)
        pairs.append((first, second) if repeat % 2 == 0 else (second, first))
    ratio = statistics.median(own[0] / plain[0] for plain, own in pairs)
    seconds = statistics.median(own[0] for _, own in pairs)
    share = pairs[0][1][1] / pairs[0][0][1]
    return f"{1e3 * seconds:.2f} ms, {ratio:.2f}x | {100 * share:.0f} %"


def where(repeats: int) -> str:
    facts = effinfer.info()
    return (
        f"SmolLM2, {TOKENS:,} tokens, {SHARE:.0%} of keys; {facts.threads} threads, {facts.isa}; "
        f"medians of {repeats} pairs with dense decoding."
    )

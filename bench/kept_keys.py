"""Methods that drop, merge, visit or encode keys, beside dense decoding and two controls with as
many keys, random ones and the first and the last: facts found, perplexity, time, bytes. Tables of
bench/techniques.py.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import effinfer
from effinfer import LLM, SamplingParams
from effinfer.techniques import (
    CSKV,
    H2O,
    KIVI,
    XKV,
    ActQKV,
    Chelsea,
    CommVQ,
    DoubleSparsity,
    InfLLMV2,
    Keyformer,
    KVCompose,
    Meta,
    Quest,
    SnapKV,
    SqueezedAttention,
    StreamingLLM,
    SubGen,
    Technique,
    TokenButler,
    TokenSelect,
    WindowKV,
    hook,
)

TOKENS = 4000
LONG = 7750  # of a context of 8,192
SHARE = 0.2  # of the keys stay
VISITED = 1 / 8  # of the keys are visited by generated tokens
FORCED = 400  # tokens whose perplexity is taken
TIMED = 12  # tokens of a turn
FITTED = 16_384  # characters of a text that methods are fitted to
# Trained for SmolLM2.
PREDICTOR = Path(__file__).resolve().parent.parent / "examples" / "selectors" / "token_butler.gguf"
CITIES = (
    *("Lisbon", "Oslo", "Cairo", "Lima", "Dublin", "Athens", "Vienna"),
    *("Madrid", "Berlin", "Paris", "Rome", "Tokyo", "Delhi", "Moscow"),
    *("London", "Boston", "Sydney", "Geneva", "Havana", "Milan"),
)
Methods = dict[str, tuple[Technique, ...]]  # by the labels of rows

LONG_HEADER = (
    "| method | keys | perplexity | time a token | bytes |\n"  #
    "|-|-|-|-|-|"
)
HEADER = (
    "| method | facts found | perplexity | time a token | bytes |\n"  #
    "|-|-|-|-|-|"
)
# What sees a question at the end of a prompt, and whom it is compared with.
SEEING = (
    *("dense", "random keys", "first and last keys"),
    *("`SnapKV`", "`SnapKV`, window 8"),
    *("`KVCompose`", "`KVCompose`, budgets by layer", "`WindowKV`"),
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


def is_wanted(label: str, rows: Collection[str]) -> bool:
    """Whether a row's label has one of these texts in it; none: all rows are wanted."""
    return not rows or any(row.lower() in label.lower() for row in rows)


def encodings(llm: LLM, text: str, rows: Collection[str] = ()) -> Methods:
    """Methods that keep all keys in fewer bits. Some are fitted to a model first, on a text that
    is measured nowhere."""
    made: Methods = {"`KIVI`, 4 bits": (KIVI(bits=4),), "`KIVI`, 2 bits": (KIVI(bits=2),)}
    if is_wanted("`CSKV`", rows):
        made["`CSKV`"] = (CSKV().calibrate(llm, text),)
    if is_wanted("`XKV`", rows):
        made["`XKV`"] = (XKV().calibrate(llm, text),)
    if is_wanted("`CommVQ`", rows):
        made["`CommVQ`"] = (CommVQ().calibrate(llm, text),)
    return made


def methods(budget: int, heads: int) -> Methods:
    """All at one budget of keys: that stay, or that are visited."""
    half = budget // 2
    return {
        "dense": (),
        "random keys": (RandomKeys(budget, heads=heads),),
        "first and last keys": (StreamingLLM(recent=budget - 4, reposition=False),),
        "`SnapKV`": (SnapKV(budget),),
        "`SnapKV`, window 8": (SnapKV(budget, window=8),),
        "`KVCompose`": (KVCompose(budget),),
        "`KVCompose`, budgets by layer": (KVCompose(budget, layer_budgets=True),),
        "`WindowKV`": (WindowKV(budget),),
        "`H2O`": (H2O(budget, recent=half),),
        "`Keyformer`": (Keyformer(budget, recent=half),),
        "`StreamingLLM`": (StreamingLLM(recent=budget - 4),),
        "`Chelsea`": (Chelsea(budget),),
        "`SubGen`": (SubGen(budget),),
        "`Quest`": (Quest(budget=budget),),
        # Questions are behind the context, whose keys are clustered once for all of them.
        "`SqueezedAttention`": (SqueezedAttention(budget=budget, context=TOKENS - 64),),
        "`TokenButler`": (TokenButler(budget=budget, path=str(PREDICTOR)),),
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
    all_methods = methods(round(SHARE * TOKENS), heads_of(dense.llm))
    all_methods |= encodings(dense.llm, fitted_text(text), wanted)
    chosen = {label: each for label, each in all_methods.items() if is_wanted(label, wanted)}
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


def long_methods(llm: LLM, text: Callable[[int], str], rows: Collection[str] = ()) -> Methods:
    """Keys that stay or are visited, in percent, and who chooses them."""
    kept, visited = round(SHARE * LONG), round(VISITED * LONG)
    made: dict[float, Methods] = {
        1: {"dense": (), **encodings(llm, fitted_text(text), rows)},
        SHARE: {
            "random keys": (RandomKeys(kept, heads=heads_of(llm)),),
            "first and last keys": (StreamingLLM(recent=kept - 4, reposition=False),),
            "`SnapKV`": (SnapKV(kept),),
            "`H2O`": (H2O(kept, recent=kept // 2),),
        },
        VISITED: {
            "random keys": (RandomKeys(visited, heads=heads_of(llm)),),
            "first and last keys": (StreamingLLM(recent=visited - 4, reposition=False),),
            "`Quest`": (Quest(budget=visited),),
            "`Quest`, units of 32": (Quest(budget=visited, unit=32),),
            "`Quest`, units of 16": (Quest(budget=visited, unit=16),),
            "`InfLLMV2`": (InfLLMV2(budget=visited, local=visited // 2),),
            "`TokenSelect`": (TokenSelect(budget=visited),),
            "`SqueezedAttention`": (SqueezedAttention(budget=visited),),
            "`TokenButler`": (TokenButler(budget=visited, path=str(PREDICTOR)),),
        },
    }
    # Labels are found on the text's beginning.
    begin = text(8 * LONG)[:4096]
    if is_wanted("`DoubleSparsity`", rows):
        made[VISITED]["`DoubleSparsity`"] = (DoubleSparsity(budget=visited).calibrate(llm, begin),)
    if is_wanted("`ActQKV`", rows):
        made[VISITED]["`ActQKV`"] = (ActQKV(budget=visited).calibrate(llm, begin),)
    return {
        f"{label} | {100 * share:.3g} %": techniques
        for share, group in made.items()
        for label, techniques in group.items()
        if is_wanted(label, rows)
    }


def measure_long(
    path: Any, text: Callable[[int], str], repeats: int, wanted: Collection[str] = ()
) -> list[str]:
    """A row for each method behind LONG tokens, or for those that are wanted."""
    dense = Subject(path, (), LONG)
    tokens = dense.llm.tokenize(text(8 * LONG))
    chosen = long_methods(dense.llm, text, wanted)
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
    chosen = methods(round(SHARE * TOKENS), heads_of(dense.llm))
    rows: list[str] = []
    for label in (label for label in SEEING if is_wanted(label, wanted)):
        subject = Subject(path, chosen[label], TOKENS) if chosen[label] else dense
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

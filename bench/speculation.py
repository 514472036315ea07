"""The section `speculation`: decoding with drafts against plain decoding of the same text.

Two models: S, SmolLM2, and B, random weights in the shape of Llama 3.1 8B cut to 8 layers, which
memory bounds. *Generated*: the model's own tokens, which are those of plain decoding. *Replayed*: a
given text is forced as the draw, with drafts and without: what speculation would gain if the model
wrote that. B only replays, token ids of SmolLM2's vocabulary.

    python bench/speculation.py --rows "S, code" --repeats 3 --no-peer   # printed and not kept
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import peers
import speculation_texts as texts
from rounds import Say, summary
from sections import Setting
from speculation_texts import Text
from worker import EngineSpec, Worker

import effinfer
from effinfer.hub import resolve
from effinfer.testing import make_model

Json = dict[str, Any]

CONTEXT = 2560
LEAST_DISTINCT = 0.6  # of a text's runs of four tokens: loops flatter every guess
COST_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
COST_STEPS = 8
NODES = 24  # of the drafts that are recorded
LOOKUPS = (10, 2)  # llama-cpp-python's default, and what it advises for CPUs
TREE = [-1, -1, 0, 0, 1, 1, 2]  # with the root eight rows
SETTLE_SECONDS = 0.1
SEQUENCES = 8
EIGHT = 8
QUICK_TOKENS = 32
SMALL, LARGE = "S", "B"


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    model: str
    text: str  # code edit, summary, answers, open text, nothing to hit
    drafts: tuple[str, ...]
    goal: float
    replayed: bool = True
    batch: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    count: int = texts.CODE_TOKENS
    costs: bool = True  # whether the gain is compared with what rows cost
    peer: bool = False  # whether llama.cpp is measured on the same text

    @property
    def key(self) -> str:
        how = "replayed" if self.replayed else "generated"
        requests = f", {self.batch} requests" if self.batch > 1 else ""
        return f"{self.model}, {self.text}, {how}{requests}"


ALL = ("suffix", "ngram", "recycling", "auto")
HOT = {"drafts": ALL, "goal": 0.98, "temperature": 1.5, "count": 128, "costs": False}
RECORDED = "recorded: "  # before the name of the proposers that drafted with the writer's logits
GUESSED = ("recycling", "auto")
ADVISED = {"temperature": 0.2, "top_p": 0.9, "count": 256}  # by SmolLM2's makers
OPEN = {"temperature": 0.8, "count": 256}
CASES = (
    Case(LARGE, "code edit", ("auto",), 2.8, peer=True),
    Case(SMALL, "code edit", ("auto",), 1.7, peer=True),
    Case(SMALL, "code edit", ("auto",), 1.4, replayed=False, peer=True),
    Case(LARGE, "summary", ("auto",), 1.5, count=texts.SUMMARY_TOKENS),
    Case(SMALL, "summary", ("auto",), 1.2, count=texts.SUMMARY_TOKENS),
    Case(LARGE, "answers", tuple(RECORDED + name for name in GUESSED), 1.6, **ADVISED),
    Case(SMALL, "answers", GUESSED, 1.1, replayed=False, **ADVISED),
    Case(LARGE, "open text", tuple(RECORDED + name for name in GUESSED), 1.6, **OPEN),
    Case(SMALL, "open text", GUESSED, 1.1, replayed=False, **OPEN),
    Case(LARGE, "nothing to hit", **HOT),
    Case(SMALL, "nothing to hit", replayed=False, **HOT),
    Case(LARGE, "nothing to hit", batch=8, **HOT),
    Case(SMALL, "nothing to hit", replayed=False, batch=8, **HOT),
    Case(LARGE, "code edit", ("auto",), 1.2, batch=8, costs=False),
)


class Bench:
    """The processes of one run, and the texts."""

    def __init__(self, setting: Setting, say: Say) -> None:
        self.setting, self.say = setting, say
        self.llm = effinfer.LLM(str(setting.model), threads=1, max_seq_len=CONTEXT)
        self.ends = set(self.llm.tokenize("<|im_end|><|endoftext|>", add_special=False))
        self.workers: dict[str, Worker] = {}
        self.sampled_texts: dict[tuple[str, float, int], list[Text]] = {}
        self.shares: dict[str, list[float]] = {}

    def path(self, model: str) -> Path:
        if model == SMALL:
            return self.setting.model
        path = self.setting.log.parent / "llama3.1-8b-8-layers.gguf"
        if not path.exists():
            self.say("writing the model")
            make_model("llama3.1-8b", path, type="q4_k", head="q6_k", layers=8)
        return path

    def start(self, name: str, spec: EngineSpec, model: str, **more: Any) -> Worker:
        if name not in self.workers:
            self.workers[name] = worker = Worker(spec, self.setting.log)
            threads = self.setting.threads
            load = {"model": str(self.path(model)), "threads": threads, "context": CONTEXT}
            worker.ask("load", **load, **more)
        return self.workers[name]

    def own(self, model: str) -> Worker:
        spec = EngineSpec("effinfer", self.setting.own.python, "effinfer_speculation.py")
        return self.start(model, spec, model)

    def close(self, *names: str) -> None:
        for name in names or list(self.workers):
            if name in self.workers:
                self.workers.pop(name).__exit__()

    def llama_cpp(self, case: Case, text: Text) -> Json:
        """Seconds of llama.cpp, by how many tokens it guesses. What it generates is its own."""
        found = {}
        for peer in (peer for peer in self.setting.peers if peer.name == "llama.cpp"):
            spec = EngineSpec(peer.name, peer.python, "llama_cpp_lookup.py")
            worker = self.start(f"llama.cpp {case.model}", spec, case.model)
            for lookup in (0, *LOOKUPS):
                time.sleep(SETTLE_SECONDS)
                found[lookup] = worker.ask(
                    "run", prompt=text.prompt, text=text.output if case.replayed else None,
                    count=min(case.count, len(text.output)), lookup=lookup,
                )  # fmt: skip
        return found

    def ask(self, case: Case, drafts: str, batch: list[Text], nodes: int | None = None) -> Json:
        """A run, when nobody's threads are awake any more."""
        time.sleep(SETTLE_SECONDS)
        recorded = None
        if drafts.startswith(RECORDED):
            recorded = self.record(drafts, batch[0])
            time.sleep(SETTLE_SECONDS)
        request = {
            "drafts": drafts,
            "nodes": nodes,
            "prompts": [text.prompt for text in batch],
            "texts": [text.output for text in batch] if case.replayed else None,
            "seeds": [text.seed for text in batch],
            "temperature": case.temperature,
            "top_p": case.top_p,
            "count": min(case.count, *(len(text.output) for text in batch)),
            "recorded": recorded,
        }
        return self.own(case.model).ask("run", **request)

    def repeats(self) -> int:
        return 1 if self.setting.quick else self.setting.repeats

    def texts_of(self, case: Case) -> list[list[Text]]:
        """For the warm-up and for each repeat the texts of a batch. A text is new to the proposers
        in each repeat: Token Recycling remembers what it saw."""
        sets = self.repeats() + 1
        if case.text == "summary":
            found = texts.summaries(self.llm, sets)
        elif case.text == "code edit":
            found = texts.code_edits(self.llm, len(texts.EDITS))
            if not case.replayed:
                found = self.written(case, found)
        elif case.text == "answers":
            found = self.sampled(case, len(texts.QUESTIONS))[texts.EARLIER_QUESTIONS :]
        else:
            found = self.sampled(case, sets * case.batch)
        found = [text for text in found if not self.ends.intersection(text.output)]
        good = [text for text in found if texts.distinct_share(text.output) >= LEAST_DISTINCT]
        if len(good) < min(2, len(found)):
            raise RuntimeError(f"{case.key}: {len(good)} of {len(found)} texts are no loops")
        self.shares[case.key] = [texts.distinct_share(text.output) for text in good]
        return [
            [good[(i * case.batch + j) % len(good)] for j in range(case.batch)] for i in range(sets)
        ]

    def written(self, case: Case, asked: list[Text]) -> list[Text]:
        """What the model answers to those prompts."""
        return [
            Text(text.name, text.prompt, self.ask(case, "plain", [text])["tokens"][0])
            for text in asked
        ]

    def sampled(self, case: Case, count: int) -> list[Text]:
        """SmolLM2's own: answers that are long enough, or what follows the openings, drawn with
        seeds 0, 1, ..."""
        known = self.sampled_texts.setdefault((case.text, case.temperature, case.count), [])
        for first in range(len(known), count, SEQUENCES):
            seeds = list(range(first, min(first + SEQUENCES, count)))
            prompts = [self.prompt(case, seed) for seed in seeds]
            answer = self.own(SMALL).ask(
                "run", drafts="plain", nodes=None, prompts=prompts, texts=None, seeds=seeds,
                temperature=case.temperature, top_p=case.top_p, count=case.count, recorded=None,
            )  # fmt: skip
            for seed, prompt, tokens in zip(seeds, prompts, answer["tokens"], strict=True):
                known.append(Text(f"seed {seed}", prompt, tokens, seed))
        return known[:count]

    def prompt(self, case: Case, seed: int) -> list[int]:
        if case.text != "answers":
            return self.llm.tokenize(texts.OPENINGS[seed % len(texts.OPENINGS)])
        question = texts.QUESTIONS[seed]
        return self.llm.chat_tokens([{"role": "user", "content": question}])

    def remember(self, case: Case, drafts: str) -> None:
        """Proposers of answers have seen others before, as they have in use."""
        if case.text != "answers":
            return
        for text in self.sampled(case, texts.EARLIER_QUESTIONS):
            if drafts.startswith(RECORDED):
                self.record(drafts, text)
            else:
                self.ask(case, drafts, [text])

    def record(self, drafts: str, text: Text) -> Any:
        """The drafts of each position, made with the logits of the model that wrote the text."""
        name = drafts.removeprefix(RECORDED)
        return self.own(SMALL).ask(
            "record", prompt=text.prompt, text=text.output, nodes=NODES, drafts=name
        )["drafts"]

    def costs(self, case: Case, text: Text) -> dict[int, float]:
        """Seconds of steps by rows, halfway through the text."""
        prompt = text.prompt + text.output[: len(text.output) // 2]
        answer = self.own(case.model).ask("costs", prompt=prompt, rows=COST_ROWS, count=COST_STEPS)
        return {int(rows): seconds for rows, seconds in answer["seconds"].items()}

    def row(self, case: Case) -> Json:
        """Runs with drafts and without take turns; a ratio is of runs that followed each other."""
        self.say(case.key)
        sets = self.texts_of(case)
        for name in case.drafts:
            self.remember(case, name)
        names = ("plain", *case.drafts)
        answers: dict[str, list[Json]] = {name: [] for name in names}
        costs: list[dict[int, float]] = []
        peer: list[Json] = []
        for repeat in range(-1, self.repeats()):
            batch = sets[repeat + 1]
            if repeat >= 0 and case.costs:
                costs.append(self.costs(case, batch[0]))
            for name in names if repeat % 2 == 0 else reversed(names):
                answers[name].append(self.ask(case, name, batch))
            for name in case.drafts:
                if answers[name][-1]["tokens"] != answers["plain"][-1]["tokens"]:
                    raise RuntimeError(f"{case.key}: {name} wrote another text")
            if case.peer:
                peer.append(self.llama_cpp(case, batch[0]))
        plain = answers["plain"][1:]
        return {
            "model": case.model, "text": case.text, "replayed": case.replayed,
            "batch": case.batch, "goal": case.goal, "distinct": summary(self.shares[case.key]),
            "texts": min(len(self.shares[case.key]), (self.repeats() + 1) * case.batch),
            "tokens": len(sets[0][0].output), "plain_tok_s": rates(plain),
            "drafts": {name: gains(plain, answers[name][1:], costs) for name in case.drafts},
            "llama.cpp": against_peer(answers[case.drafts[-1]][1:], peer[1:]),
        }  # fmt: skip


def tokens_in(run: Json) -> int:
    """Of the time measured: each request's first token is before it."""
    return sum(len(text) - 1 for text in run["tokens"])


def rates(runs: list[Json]) -> dict[str, float]:
    return summary([tokens_in(run) / run["seconds"] for run in runs])


def predicted(run: Json, costs: dict[int, float]) -> float:
    """Of one request: how many times as fast as one token a step its steps would be, with drafts
    that cost nothing to make, each at the measured time of a step with so many rows."""
    seconds = sum(n * at_rows(costs, int(rows)) for rows, n in run["by_rows"].items())
    return float(tokens_in(run) * costs[1] / seconds)


def at_rows(costs: dict[int, float], rows: float) -> float:
    """Between two measured numbers of rows on the line, beyond the last along the last line."""
    known = sorted(costs)
    above = next((i for i, count in enumerate(known) if count >= rows), len(known) - 1)
    low, high = known[max(above, 1) - 1], known[max(above, 1)]
    part = (rows - low) / (high - low)
    return costs[low] + part * (costs[high] - costs[low])


def gains(plain: list[Json], drafted: list[Json], costs: list[dict[int, float]]) -> Json:
    ratios = [a["seconds"] / b["seconds"] for a, b in zip(plain, drafted, strict=True)]
    total = {key: sum(run[key] for run in drafted) for key in ("steps", "drafted", "accepted")}
    hoped = [predicted(run, cost) for run, cost in zip(drafted, costs, strict=False)]
    shares = [ratio / hope for ratio, hope in zip(ratios, hoped, strict=False)]
    return {
        "ratio": summary(ratios),
        "tok_s": rates(drafted),
        "tokens_a_step": sum(map(tokens_in, drafted)) / total["steps"],
        "rows_a_step": sum(run["rows"] for run in drafted) / total["steps"],
        "accepted": total["accepted"] / max(total["drafted"], 1),
        "predicted": summary(hoped) if hoped else None,
        "share": summary(shares) if shares else None,
    }


def against_peer(drafted: list[Json], peer: list[Json]) -> Json:
    """By how many tokens llama.cpp guesses: its rate, and ours over it."""
    return {
        str(lookup): {
            "tok_s": rates([{**run[lookup], "tokens": [run[lookup]["tokens"]]} for run in peer]),
            "ratio": summary(
                [
                    theirs[lookup]["seconds"] / ours["seconds"]
                    for ours, theirs in zip(drafted, peer, strict=True)
                ]
            ),
        }
        for lookup in (peer[0] if peer else ())
    }


def speculation(setting: Setting, say: Say) -> Json:
    return measure(setting, say, "")


SECTIONS = {"speculation": speculation}


def measure(setting: Setting, say: Say, pattern: str) -> Json:
    """The rows whose names contain the pattern. Rows of a model follow each other, and an engine
    that the next row does not need is gone before it."""
    bench = Bench(setting, say)
    rows: Json = {}
    extra: Json = {}
    try:
        for case in (case for case in CASES if pattern in case.key):
            case = replace(case, count=QUICK_TOKENS) if setting.quick else case
            for model in (SMALL, LARGE):
                bench.own(model).ask("keep", drafts=["plain", *case.drafts])
            rows[case.key] = bench.row(case)
            tell(case.key, rows[case.key], say)
        for model in (SMALL, LARGE):
            if pattern in (name := f"{model}, eight rows"):
                say(name)
                bench.own(model).ask("keep", drafts=["recorded"])
                extra[model] = steps(bench, model)
                say(f"{name}: {extra[model]}")
    finally:
        bench.close()
    return {"rows": rows, "eight": extra}


def steps(bench: Bench, model: str) -> Json:
    """Of eight rows: a tree's time against a chain's, and the time that drafts take beside their
    rows against a plain step's."""
    case = Case(model, "code edit", ("auto",), 0)
    found = texts.code_edits(bench.llm, bench.repeats() + 1)
    trees, shares, worker = [], [], bench.own(model)
    for repeat, text in enumerate(found):
        half = text.prompt + text.output[: len(text.output) // 2]
        asked = {"prompt": half, "count": 3 * COST_STEPS}
        seconds = worker.ask("costs", rows=[1, EIGHT], **asked)["seconds"]
        tree = worker.ask("costs", rows=[EIGHT], parents=TREE, **asked)["seconds"]
        run = bench.ask(case, "auto", [text], nodes=EIGHT - 1)
        if repeat > 0:
            trees.append(tree[str(EIGHT)] / seconds[str(EIGHT)])
            shares.append(run["drafting_s"] / run["steps"] / seconds["1"])
    return {"tree": summary(trees), "bookkeeping": summary(shares)}


def tell(key: str, row: Json, say: Say) -> None:
    for name, found in row["drafts"].items():
        share = f", {found['share']['median']:.0%} of the prediction" if found["share"] else ""
        say(
            f"{key}: {name} {found['ratio']['median']:.2f}x plain's "
            f"{row['plain_tok_s']['median']:.1f} tok/s (goal {row['goal']}){share}; "
            f"{found['tokens_a_step']:.2f} tokens and {found['rows_a_step']:.2f} rows a step, "
            f"{found['accepted']:.0%} of drafts accepted"
        )
    for lookup, theirs in row["llama.cpp"].items():
        say(
            f"{key}: {theirs['ratio']['median']:.2f}x llama.cpp, guesses of {lookup}: "
            f"{theirs['tok_s']['median']:.1f} tok/s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="", help="a part of their names; default: all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="short texts: a test of the harness")
    parser.add_argument("--no-peer", action="store_true", help="without llama.cpp")
    options = parser.parse_args()
    scratch = texts.ROOT / "build" / "bench"
    scratch.mkdir(parents=True, exist_ok=True)
    setting = Setting(
        model=Path(resolve("smollm2-135m")), vocab_size=0, threads=options.threads,
        repeats=options.repeats, decode_tokens=0, prefill_tokens=0,
        own=EngineSpec("effinfer", Path(sys.executable), "effinfer_worker.py"),
        peers=[] if options.no_peer else [
            EngineSpec("llama.cpp", peers.ensure(peers.LLAMA_CPP), peers.LLAMA_WORKER)
        ],
        log=scratch / "workers.log", quick=options.quick,
    )  # fmt: skip
    measure(setting, lambda text: print(text, flush=True), options.rows)


if __name__ == "__main__":
    main()

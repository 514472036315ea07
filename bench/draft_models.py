"""The section `draft_models`: models and heads that draft, against the target alone, and a draft
model on a core of its own against the same one on all cores before the step.

Targets: S, SmolLM2, and its twins T and H of eight and four times the depth, which memory bounds:
they write what SmolLM2 writes, so SmolLM2 is a perfect draft for them, and what drafting costs is
left. All texts are the targets' own, and the same with drafts and without.

    python bench/draft_models.py --rows "T, hydra" --repeats 3    # printed and not kept
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import speculation_texts as texts
from rounds import SETTLE_SECONDS, Say, summary
from sections import Setting
from speculation import ADVISED, OPEN, QUICK_TOKENS, at_rows, gains, tokens_in
from worker import EngineSpec, Worker

import effinfer
from effinfer.checkpoints.quantization import quantize
from effinfer.hub import resolve
from effinfer.testing import make_twin

Json = dict[str, Any]

CONTEXT = 1024
SMALL, TWIN, HALF = "S", "T", "H"
DEPTHS = {TWIN: 8, HALF: 4}
COST_ROWS = (1, 2, 3, 4, 6, 8)
COST_STEPS = 8
PROMPT_TOKENS = 512
TOKENS = 128
BESIDE = "small, on a core of its own"


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    target: str
    drafts: str
    goal: float
    text: str = "answers"  # or open text
    against: str = "plain"
    share_goal: float | None = None  # of what the acceptance and the costs of rows predict

    @property
    def key(self) -> str:
        return f"{self.target}, {self.text}, {self.drafts}"

    def sampling(self, quick: bool) -> Json:
        given = {"top_p": 1.0, **(ADVISED if self.text == "answers" else OPEN)}
        count = QUICK_TOKENS if quick else TOKENS
        return {**given, "count": count}


CASES = (
    Case(TWIN, "small", 2.3),
    Case(TWIN, BESIDE, 0.95, against="small"),
    Case(HALF, "small", 1.0),
    Case(HALF, BESIDE, 0.95, against="small"),
    Case(TWIN, "requantised", 1.0, share_goal=0.9),
    Case(TWIN, "fewer layers", 1.0, share_goal=0.9),
    Case(TWIN, "medusa", 1.5, text="open text"),
    Case(TWIN, "hydra", 1.5, text="open text"),
    Case(TWIN, "eagle", 1.5, text="open text"),
    Case(SMALL, "fewer layers", 0.98),
    Case(SMALL, "fewer layers, cut head", 0.98),
    Case(SMALL, "medusa", 1.1, text="open text"),
    Case(SMALL, "hydra", 1.1, text="open text"),
    Case(SMALL, "eagle", 1.1, text="open text"),
)


class Bench:
    """The processes of one run: of all targets and drafts, and of what rows cost."""

    def __init__(self, setting: Setting, say: Say) -> None:
        self.setting, self.say = setting, say
        self.llm = effinfer.LLM(str(setting.model), threads=1, max_seq_len=CONTEXT)
        self.targets = {SMALL: setting.model}
        for target, depth in DEPTHS.items():
            make = partial(make_twin, depth=depth)
            self.targets[target] = self.made(f"smollm2-135m-twin-{depth}.gguf", make)
        own = setting.own.python
        self.worker = Worker(EngineSpec("drafts", own, "effinfer_draft_models.py"), setting.log)
        self.worker.ask(
            "load",
            targets={name: str(path) for name, path in self.targets.items()},
            small=str(setting.model),
            requantised=str(self.made("smollm2-135m-q4_0.gguf", requantise)),
            threads=setting.threads,
            context=CONTEXT,
        )
        self.rows: dict[str, Worker] = {}

    def made(self, name: str, make: Any) -> Path:
        path = self.setting.log.parent / name
        if not path.exists():
            self.say(f"writing {name}")
            make(self.setting.model, path)
        return path

    def close(self) -> None:
        for worker in (self.worker, *self.rows.values()):
            worker.__exit__()

    def repeats(self) -> int:
        return 1 if self.setting.quick else self.setting.repeats

    def prompt(self, case: Case, repeat: int) -> list[int]:
        """Another one in each repeat, the warm-up's among them."""
        if case.text == "open text":
            return self.llm.tokenize(texts.OPENINGS[(repeat + 1) % len(texts.OPENINGS)])
        question = texts.QUESTIONS[(repeat + 1) % len(texts.QUESTIONS)]
        return self.llm.chat_tokens([{"role": "user", "content": question}])

    def ask(self, command: str, case: Case, drafts: str, **more: Any) -> Json:
        """When nobody's threads are awake any more."""
        time.sleep(SETTLE_SECONDS)
        return self.worker.ask(command, target=case.target, drafts=drafts, **more)

    def costs(self, case: Case, prompt: list[int]) -> dict[int, float]:
        """Seconds of the target's steps by rows."""
        if case.target not in self.rows:
            spec = EngineSpec("rows", self.setting.own.python, "effinfer_speculation.py")
            self.rows[case.target] = worker = Worker(spec, self.setting.log)
            load = {"model": str(self.targets[case.target]), "context": CONTEXT}
            worker.ask("load", threads=self.setting.threads, **load)
        time.sleep(SETTLE_SECONDS)
        asked = {"prompt": prompt, "rows": COST_ROWS, "count": COST_STEPS}
        answer = self.rows[case.target].ask("costs", **asked)
        return {int(rows): seconds for rows, seconds in answer["seconds"].items()}

    def row(self, case: Case) -> Json:
        """Runs of both kinds take turns; a ratio is of runs that followed each other."""
        self.say(case.key)
        names = (case.against, case.drafts)
        self.worker.ask("keep", target=case.target, drafts=names)
        answers: dict[str, list[Json]] = {name: [] for name in names}
        costs: list[dict[int, float]] = []
        for repeat in range(-1, self.repeats()):
            asked = {"prompt": self.prompt(case, repeat), "seed": repeat + 1}
            asked |= case.sampling(self.setting.quick)
            for name in names if repeat % 2 == 0 else reversed(names):
                answers[name].append(self.ask("run", case, name, **asked))
            if answers[case.drafts][-1]["tokens"] != answers[case.against][-1]["tokens"]:
                raise RuntimeError(f"{case.key}: another text than {case.against}'s")
            if case.share_goal and repeat >= 0:
                costs.append(self.costs(case, asked["prompt"]))
        before, drafted = (answers[name][1:] for name in names)
        found = gains(before, drafted, [])
        row = {"goal": case.goal, "against": case.against, "share_goal": case.share_goal,
               "before": gains(before, before, [])["tok_s"], **found}  # fmt: skip
        if costs:
            hoped = [predicted(run, cost) for run, cost in zip(drafted, costs, strict=True)]
            pairs = zip(before, drafted, hoped, strict=True)
            row["predicted"] = summary(hoped)
            row["share"] = summary([a["seconds"] / b["seconds"] / hope for a, b, hope in pairs])
        if case.drafts == BESIDE:
            count = QUICK_TOKENS if self.setting.quick else TOKENS
            shares = [
                self.ask("overlap", case, BESIDE, prompt=self.prompt(case, i), count=count)["share"]
                for i in range(self.repeats())
            ]
            row["overlapped"] = summary(shares)
        return row

    def first_token(self) -> Json:
        """The time to the first token with a draft model over that without."""
        case = CASES[0]
        self.say("time to the first token")
        self.worker.ask("keep", target=TWIN, drafts=("plain", "small"))
        seconds: dict[str, list[float]] = {"plain": [], "small": []}
        source = random.Random(1)
        for repeat in range(-1, self.repeats()):
            prompt = [source.randrange(1000, 40000) for _ in range(PROMPT_TOKENS)]
            for name in seconds if repeat % 2 == 0 else reversed(seconds):
                answer = self.ask("first", case, name, prompt=prompt)
                if repeat >= 0:
                    seconds[name].append(answer["seconds"])
        ratios = [b / a for a, b in zip(seconds["plain"], seconds["small"], strict=True)]
        return {"ratio": summary(ratios), **{name: summary(s) for name, s in seconds.items()}}


def requantise(model: Path, path: Path) -> None:
    quantize(model, path, "q4_0", head="q4_0")


def predicted(run: Json, costs: dict[int, float]) -> float:
    """How many times as fast as a token a step: the run's steps at the measured times of their
    rows, and the time that its drafts took."""
    seconds = sum(n * at_rows(costs, int(rows)) for rows, n in run["by_rows"].items())
    return float(tokens_in(run) * costs[1] / (seconds + run["drafting_s"]))


def tell(key: str, row: Json, say: Say) -> None:
    share = f", {row['share']['median']:.0%} of the prediction" if row["share"] else ""
    say(
        f"{key}: {row['ratio']['median']:.2f}x {row['against']}'s "
        f"{row['before']['median']:.1f} tok/s (goal {row['goal']}){share}; "
        f"{row['tokens_a_step']:.2f} tokens and {row['rows_a_step']:.2f} rows a step, "
        f"{row['accepted']:.0%} of drafts accepted"
    )


def measure(setting: Setting, say: Say, pattern: str = "") -> Json:
    """The rows whose names contain the pattern."""
    bench = Bench(setting, say)
    rows: Json = {}
    try:
        for case in (case for case in CASES if pattern in case.key):
            rows[case.key] = found = bench.row(case)
            tell(case.key, found, say)
        first = bench.first_token() if not pattern else None
    finally:
        bench.close()
    return {"rows": rows, "first_token": first}


SECTIONS = {"draft_models": measure}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="", help="a part of their names; default: all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="short texts: a test of the harness")
    options = parser.parse_args()
    scratch = texts.ROOT / "build" / "bench"
    scratch.mkdir(parents=True, exist_ok=True)
    setting = Setting(
        model=Path(resolve("smollm2-135m")), vocab_size=0, threads=options.threads,
        repeats=options.repeats, decode_tokens=0, prefill_tokens=0,
        own=EngineSpec("effinfer", Path(sys.executable), "effinfer_worker.py"), peers=[],
        log=scratch / "workers.log", quick=options.quick,
    )  # fmt: skip
    measure(setting, lambda text: print(text, flush=True), options.rows)


if __name__ == "__main__":
    main()

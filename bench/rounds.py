"""Questions put to several engines in turn: the interleaving that all speed sections share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker import EngineSpec, Worker, WorkerError

# Threads of an engine may spin a while after its work: let them sleep before the next one starts.
SETTLE_SECONDS = 0.3

Say = Callable[[str], None]


@dataclass(frozen=True)
class Question:
    """One thing to measure. `arguments(repeat)` are the command's, the same for every engine;
    the value of an answer is `amount` over its seconds, or the seconds where there is no amount."""

    key: str
    command: str
    arguments: Callable[[int], dict[str, Any]]
    amount: float | None = None

    def value(self, answer: dict[str, Any]) -> float:
        return self.amount / answer["seconds"] if self.amount else answer["seconds"]


def summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def last_line(error: Exception) -> str:
    """A reason for the tables: the lines before the last are a trace."""
    return (str(error).strip().splitlines() or ["no reason given"])[-1]


def interleave(
    specs: list[EngineSpec],
    load: dict[str, Any],
    questions: list[Question],
    repeats: int,
    log: Path,
    say: Say,
    settle: float = SETTLE_SECONDS,
) -> dict[str, dict[str, Any]]:
    """Engine -> {key: {median, min, max}, peak_rss_bytes}, or {error}. Questions in order; each is
    asked once unmeasured and then `repeats` times, the engines taking turns."""
    workers: dict[str, Worker] = {}
    results: dict[str, dict[str, Any]] = {spec.name: {} for spec in specs}
    try:
        for spec in specs:
            workers[spec.name] = worker = Worker(spec, log)
            try:
                worker.ask("load", **{**load, **spec.load_options})
            except WorkerError as error:
                results[spec.name] = {"error": last_line(error)}
        working = [name for name, result in results.items() if "error" not in result]
        for question in questions:
            say(question.key)
            for name, answer in take_turns(workers, working, question, repeats, settle).items():
                results[name][question.key] = answer
        for name in working:
            results[name] |= workers[name].ask("memory")
    finally:
        for worker in workers.values():
            worker.__exit__()
    return results


def take_turns(
    workers: dict[str, Worker],
    names: list[str],
    question: Question,
    repeats: int,
    settle: float,
) -> dict[str, dict[str, Any]]:
    values: dict[str, list[float]] = {name: [] for name in names}
    failed: dict[str, dict[str, Any]] = {}
    for repeat in range(-1, repeats):
        for name in names if repeat % 2 == 0 else reversed(names):
            if name in failed:
                continue
            time.sleep(settle)
            try:
                answer = workers[name].ask(question.command, **question.arguments(repeat))
            except WorkerError as error:
                failed[name] = {"error": last_line(error)}
                continue
            if repeat >= 0:
                values[name].append(question.value(answer))
    return failed | {name: summary(v) for name, v in values.items() if v}

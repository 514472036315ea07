"""Load, prefill and decode of several engines on one file, interleaved."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker import EngineSpec, Worker, WorkerError

# Threads of an engine may spin a while after its work: let them sleep before the next one starts.
SETTLE_SECONDS = 0.3


@dataclass(frozen=True)
class Settings:
    threads: int
    repeats: int
    prefill_tokens: int
    decode_tokens: int
    decode_prompt_tokens: int
    vocab_size: int
    log: Path

    @property
    def context(self) -> int:
        longest = max(self.prefill_tokens, self.decode_prompt_tokens + self.decode_tokens)
        return -(-(longest + 64) // 256) * 256

    def prompt(self, count: int, repeat: int) -> list[int]:
        """Random ids, new ones each repeat and the same for every engine."""
        source = random.Random(1000 * count + repeat)
        return [source.randrange(1000, self.vocab_size) for _ in range(count)]


def summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def measure_loads(
    specs: list[EngineSpec], model: Path, settings: Settings, say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Engine name -> {load_s, ...} or {error}; each load in a process of its own."""
    results: dict[str, dict[str, Any]] = {spec.name: {} for spec in specs}
    seconds: dict[str, list[float]] = {spec.name: [] for spec in specs}
    for repeat in range(settings.repeats):
        say(f"load {repeat + 1}/{settings.repeats}")
        for spec in specs:
            if "error" in results[spec.name]:
                continue
            try:
                with Worker(spec, settings.log) as worker:
                    answer = worker.load(model, settings.threads, settings.context)
            except WorkerError as error:
                results[spec.name] = {"error": str(error)}
                continue
            seconds[spec.name].append(answer.pop("seconds"))
            results[spec.name] = {"engine": answer, "load_s": summary(seconds[spec.name])}
    return results


def measure_speed(
    specs: list[EngineSpec], model: Path, settings: Settings, say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Engine name -> {prefill_tok_s, decode_tok_s, peak_rss_bytes} or {error}."""
    workers: dict[str, Worker] = {}
    results: dict[str, dict[str, Any]] = {}
    rates: dict[str, dict[str, list[float]]] = {}
    try:
        for spec in specs:
            workers[spec.name] = Worker(spec, settings.log)
            error = warm_up(workers[spec.name], model, settings)
            if error:
                results[spec.name] = {"error": error}
            else:
                rates[spec.name] = {"prefill": [], "decode": []}
        for repeat in range(settings.repeats):
            say(f"speed {repeat + 1}/{settings.repeats}")
            order = list(rates)
            for name in order if repeat % 2 == 0 else reversed(order):
                time.sleep(SETTLE_SECONDS)
                for kind, rate in one_round(workers[name], settings, repeat).items():
                    rates[name][kind].append(rate)
        for name, measured in rates.items():
            results[name] = {
                "prefill_tok_s": summary(measured["prefill"]),
                "decode_tok_s": summary(measured["decode"]),
                **workers[name].ask("memory"),
            }
    finally:
        for worker in workers.values():
            worker.__exit__()
    return results


def warm_up(worker: Worker, model: Path, settings: Settings) -> str | None:
    """Loads and runs one unmeasured round; the reason when the engine cannot."""
    try:
        worker.load(model, settings.threads, settings.context)
        one_round(worker, settings, repeat=-1)
    except WorkerError as error:
        return str(error)
    return None


def one_round(worker: Worker, settings: Settings, repeat: int) -> dict[str, float]:
    """Tokens per second of one prefill and one decode."""
    tokens = settings.prompt(settings.prefill_tokens, repeat)
    prefill = worker.ask("prefill", tokens=tokens)["seconds"]
    prompt = settings.prompt(settings.decode_prompt_tokens, repeat)
    decode = worker.ask("decode", prompt=prompt, count=settings.decode_tokens)["seconds"]
    return {
        "prefill": settings.prefill_tokens / prefill,
        "decode": settings.decode_tokens / decode,
    }

"""Load, prefill and decode of several engines on one file, interleaved."""

from __future__ import annotations

from typing import Any

from rounds import Say, last_line, summary
from sections import SHORT_PROMPT, Setting, decode_question, prefill_question
from worker import EngineSpec, Worker, WorkerError


def longest(setting: Setting) -> int:
    return max(setting.prefill_tokens, SHORT_PROMPT + setting.decode_tokens)


def measure_loads(specs: list[EngineSpec], setting: Setting, say: Say) -> dict[str, dict[str, Any]]:
    """Engine name -> {load_s, engine: facts} or {error}; each load in a process of its own."""
    results: dict[str, dict[str, Any]] = {spec.name: {} for spec in specs}
    seconds: dict[str, list[float]] = {spec.name: [] for spec in specs}
    for repeat in range(setting.repeats):
        say(f"load {repeat + 1}/{setting.repeats}")
        for spec in specs:
            if "error" in results[spec.name]:
                continue
            try:
                with Worker(spec, setting.log) as worker:
                    load = setting.load(longest(setting))
                    answer = worker.ask("load", **{**load, **spec.load_options})
            except WorkerError as error:
                results[spec.name] = {"error": last_line(error)}
                continue
            seconds[spec.name].append(answer.pop("seconds"))
            results[spec.name] = {"engine": answer, "load_s": summary(seconds[spec.name])}
    return results


def measure_speed(
    specs: list[EngineSpec], setting: Setting, say: Say, variants: list[EngineSpec]
) -> dict[str, dict[str, Any]]:
    """Engine name -> {load_s, engine, prefill_tok_s, decode_tok_s, peak_rss_bytes} or {error}.
    `variants`: the same engines with other options, whose load is not measured."""
    loads = measure_loads(specs, setting, say)
    working = [spec for spec in specs if "error" not in loads[spec.name]]
    questions = [
        prefill_question(setting, "prefill_tok_s", setting.prefill_tokens),
        decode_question(setting, "decode_tok_s", SHORT_PROMPT, setting.decode_tokens, again=False),
    ]
    rates = setting.run(working + variants, setting.load(longest(setting)), questions, say)
    return {name: {**loads.get(name, {}), **rates.get(name, {})} for name in {**loads, **rates}}

"""This version beside another one, measured in turns: which rows got slower, and by how much.

    make bench-compare BEFORE=/path/of/a/checkout    (with its .venv, as `make test` leaves it)

Each version runs its own workers in its own environment. A row's ratio is that of the medians, this
version over the other; above 1 is faster. Exits 1 when a row is slower than --limit allows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import operators
import sections
from rounds import Question, interleave
from run import MODELS, ROOT, SCRATCH, vocabulary
from sections import SHORT_PROMPT, Setting, decode_question, prefill_question
from worker import EngineSpec

import effinfer
from effinfer.hub import resolve

LEVELS = ("avx512", "avx2")


def specs(before: Path, script: str, level: str) -> list[EngineSpec]:
    environment = {"EFFINFER_ISA": level}
    other = before / ".venv" / "bin" / "python", str(before / "bench" / "workers" / script)
    return [
        EngineSpec("before", *other, environment),
        EngineSpec("after", Path(sys.executable), script, environment),
    ]


def model_questions(setting: Setting) -> list[Question]:
    """Prefill, decode at a depth, requests together, a verification step."""

    def batch(repeat: int) -> dict[str, Any]:
        prompts = [setting.prompt(SHORT_PROMPT, 64 * i + repeat) for i in range(8)]
        return {"prompts": prompts, "count": 32}

    def verify(repeat: int) -> dict[str, Any]:
        prompt = setting.prompt(SHORT_PROMPT, repeat)
        return {"prompt": prompt, "tokens": setting.prompt(8, repeat), "steps": 24}

    return [
        prefill_question(setting, "prefill 512", 512),
        prefill_question(setting, "prefill 2,048", 2048),
        decode_question(setting, "decode", SHORT_PROMPT, 128, again=False),
        decode_question(setting, "decode at 4,096", 4096, 64, again=True),
        Question("8 requests", "batch", batch, 8 * 32),
        Question("verify 8 tokens", "verify", verify),
    ]


def operator_questions() -> list[Question]:
    def question(name: str, command: str, request: dict[str, Any]) -> Question:
        return Question(name, command, lambda _: {**request, "seconds": operators.SECONDS})

    questions = [
        question(f"attention, n={rows}", "attention", {**operators.ATTENTION, "n": rows})
        for rows in operators.ROWS
    ]
    for name, case in operators.LIBRARY.items():
        for dtype in ("bf16", "f32"):
            request = {**operators.ATTENTION, **case, "dtype": dtype}
            questions.append(question(f"{name}, {dtype}", "library", request))
    for name, filters in operators.FILTERS.items():
        request = {**filters, "vocab": operators.VOCABULARY, "batch": 8}
        questions.append(question(name, "sampling", request))
    return questions


def rows(found: dict[str, dict[str, Any]], questions: list[Question]) -> Iterator[tuple[str, Any]]:
    """(row, after over before) where both answered, else (row, why not)."""
    for question in questions:
        answers = [found[name].get(question.key, found[name]) for name in ("before", "after")]
        if any("median" not in answer for answer in answers):
            yield question.key, "; ".join(str(a.get("error", "")) for a in answers)
            continue
        ratio = answers[1]["median"] / answers[0]["median"]
        yield question.key, ratio if question.amount else 1 / ratio
    peaks = [found[name].get("peak_rss_bytes", 0) for name in ("before", "after")]
    if all(peaks):
        yield "peak memory, MB", [round(peak / 1e6, 1) for peak in peaks]


def compare_model(options: argparse.Namespace, name: str, level: str) -> dict[str, Any]:
    path = Path(resolve(name))
    setting = Setting(
        path, vocabulary(gguf.GGUFReader(str(path))), options.threads, options.repeats, 128, 512,
        *specs(options.before, "effinfer_worker.py", level)[:1], [], SCRATCH / "compare.log",
    )  # fmt: skip
    questions = model_questions(setting)
    load = setting.load(max(sections.DEPTHS) + 64, kv_dtype="bf16", sequences=8, prefix_cache=True)
    both = specs(options.before, "effinfer_worker.py", level)
    log = SCRATCH / "compare.log"
    found = interleave(both, load, questions, options.repeats, log, lambda text: None)
    return dict(rows(found, questions))


def compare_operators(options: argparse.Namespace, level: str) -> dict[str, Any]:
    questions = operator_questions()
    both = specs(options.before, "effinfer_operators.py", level)
    load, log = {"threads": options.threads}, SCRATCH / "compare.log"
    found = interleave(both, load, questions, options.repeats, log, lambda text: None, settle=0)
    return dict(rows(found, questions))


def show(group: str, ratios: dict[str, Any], limit: float) -> int:
    """Prints a group; the number of rows that are slower than the limit allows."""
    slower = 0
    for row, value in ratios.items():
        below = isinstance(value, float) and value < limit
        slower += below
        text = f"{value:.3f}" if isinstance(value, float) else str(value)
        print(f"{group:28} {row:40} {text}{'  slower' if below else ''}", flush=True)
    return slower


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="a checkout with its .venv")
    parser.add_argument("--threads", type=int, default=effinfer.info().threads)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default="", help='part of a group, such as "operators, avx2"')
    parser.add_argument("--limit", type=float, default=0.98, help="least ratio that passes")
    parser.add_argument("--out", type=Path, help="the ratios as JSON")
    options = parser.parse_args()
    SCRATCH.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    slower = 0
    for level in (level for level in LEVELS if level in effinfer.info().available_isas):
        groups: dict[str, Callable[[], dict[str, Any]]] = {
            f"{name}, {level}": partial(compare_model, options, name, level) for name in MODELS
        }
        groups[f"operators, {level}"] = partial(compare_operators, options, level)
        for group in (group for group in groups if options.only in group):
            found[group] = groups[group]()
            slower += show(group, found[group], options.limit)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"compare: {slower} rows below {options.limit}; log in {(SCRATCH).relative_to(ROOT)}")
    sys.exit(1 if slower else 0)


if __name__ == "__main__":
    main()

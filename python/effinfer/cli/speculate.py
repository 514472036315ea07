"""effinfer bench --speculate: what drafts gain on a text."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from effinfer import _core
from effinfer.checkpoints.model_files import open_model
from effinfer.cli import texts
from effinfer.cli.output import note
from effinfer.hub.progress import resolve_with_bar
from effinfer.llm import LLM
from effinfer.sampling import SamplingParams

_SOURCE = '''\
def mean(values):
    """The arithmetic mean of the values."""
    total = 0.0
    count = 0
    for value in values:
        if value is None:
            continue
        total += value
        count += 1
    if count == 0:
        raise ValueError("mean of no values")
    return total / count


def variance(values):
    """The mean square distance of the values from their mean."""
    middle = mean(values)
    total = 0.0
    count = 0
    for value in values:
        if value is None:
            continue
        total += (value - middle) ** 2
        count += 1
    return total / count
'''
_EDIT = f"""A file:

```python
{_SOURCE}```

The same file with `values` renamed to `samples` and `total` to `amount`:

```python
"""


def prompt_of(model: str, file: Path | None) -> list[int]:
    """The tokens of the file's text, or of a source file that is to be edited."""
    text = _EDIT if file is None else texts.read_file(file)
    ids = open_model(resolve_with_bar(model)).tokenizer().encode(text)
    if not ids:
        raise _core.InvalidArgumentError(f"[bench] {file}: expected some text")
    return ids


def measure(llm: LLM, prompt: Sequence[int], count: int, repeat: int) -> dict[str, Any]:
    """The same text with drafts and without, in turns. Each run's text is sampled with a seed of
    its own: proposers may remember what they saw."""
    runs: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for seed in range(repeat + 1):
        texts = {}
        for drafts in (True, False) if seed % 2 else (False, True):
            texts[drafts], metrics = _run(llm, prompt, count, seed, drafts)
            if seed > 0:  # the first run touches memory and learns what rows cost
                runs[drafts].append(metrics)
        if texts[True] != texts[False]:
            raise _core.Error("[bench] drafts changed the text")
    plain, drafted = ([_rate(m) for m in runs[drafts]] for drafts in (False, True))
    parts = [m["speculation"] for m in runs[True]]
    steps = sum(part["steps"] for part in parts)
    return {
        "prompt_tokens": len(prompt),
        "tokens": count,
        "plain_tok_s": statistics.median(plain),
        "drafted_tok_s": statistics.median(drafted),
        "gain": statistics.median(b / a for a, b in zip(plain, drafted, strict=True)),
        "drafting_steps": steps,
        "drafted_a_step": sum(part["drafted"] for part in parts) / max(steps, 1),
        "accepted_a_step": sum(part["accepted"] for part in parts) / max(steps, 1),
        "acceptance_by_depth": _by_depth(parts),
    }


def _run(
    llm: LLM, prompt: Sequence[int], count: int, seed: int, drafts: bool
) -> tuple[list[int], dict[str, Any]]:
    engine = llm.engine
    params = SamplingParams(
        temperature=0.6, top_p=0.95, max_tokens=count, ignore_eos=True, seed=seed,
        speculation=drafts,
    )  # fmt: skip
    request = engine.add(prompt, params.to_core())
    tokens: list[int] = []
    while engine.has_work():
        for output in engine.step_many():
            if output.finish_reason == "error":
                raise _core.Error(output.error)
            tokens += output.token_ids
    metrics: dict[str, Any] = engine.metrics(request)
    engine.forget(request)
    return tokens, metrics


def _rate(metrics: dict[str, Any]) -> float:
    seconds = metrics["total_s"] - metrics["time_to_first_token_s"]
    return float((metrics["output_tokens"] - 1) / seconds)


def _by_depth(parts: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Depths that had drafts; the last stands for all below it."""
    columns = [
        (sum(drafted), sum(accepted))
        for drafted, accepted in zip(
            zip(*(p["drafted_at"] for p in parts), strict=True),
            zip(*(p["accepted_at"] for p in parts), strict=True),
            strict=True,
        )
    ]
    return [
        {"depth": depth, "drafted": drafted, "accepted": accepted}
        for depth, (drafted, accepted) in enumerate(columns, 1)
        if drafted
    ]


def print_gain(name: str, found: dict[str, Any]) -> None:
    print(
        f"drafts  {found['tokens']:>5} tokens {found['drafted_tok_s']:>9.1f} tok/s with {name}, "
        f"{found['plain_tok_s']:.1f} without: {found['gain']:.2f}x; "
        f"{found['accepted_a_step']:.2f} of {found['drafted_a_step']:.2f} accepted a step"
    )
    for row in found["acceptance_by_depth"]:
        share = row["accepted"] / row["drafted"]
        print(
            f"  depth {row['depth']:>2} {row['accepted']:>6} of {row['drafted']:>6} {share:>6.0%}"
        )
    if not found["acceptance_by_depth"]:
        note("no draft was worth a row")

"""`effinfer bench --profile` and `--trace`: where the time of a step goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from effinfer import _core
from effinfer.llm import LLM

Run = Callable[[list[int], int], Any]  # one greedy request: prompt, tokens to generate
TRACED_TOKENS = 5
TRACED_DRAFTED = 64  # beside a model that drafts on a device of its own: it has to read the prompt
_PREFILLS = 3
_WIDTH = 132


@dataclass
class Bounds:
    """What this machine can do at most, measured when first asked for."""

    pool: _core.ThreadPool
    read_bandwidth: float
    peak_ops: dict[str, float] = field(default_factory=dict)  # only what could be measured

    @classmethod
    def measure(cls, engine: _core.Engine) -> Bounds:
        pool = _core.ThreadPool.pinned(engine.cores, engine.threads)
        return cls(pool, _core.measure_read_bandwidth(pool))

    def seconds(self, row: dict[str, Any]) -> tuple[str, float]:
        """What bounds the calls of a row, and the time that this takes."""
        memory = row["bytes"] / self.read_bandwidth
        peak = self._peak(row["arithmetic"], row["isa"])
        compute = row["ops"] / peak if peak else 0.0
        return max(("memory", memory), ("compute", compute), key=lambda bound: bound[1])

    def _peak(self, arithmetic: str, isa: str) -> float:
        name = f"{arithmetic}.{isa}"
        if name not in self.peak_ops:
            self.peak_ops[name] = _core.measure_peak_ops(self.pool, arithmetic, isa)
        return self.peak_ops[name]


def profile(llm: LLM, run: Run, prompt: list[int], tg: int) -> dict[str, Any]:
    """The time of prefill and decode steps by kernel, against what the machine can give: the CPU,
    as nothing here measures what a GPU can."""
    engine = llm.engine
    engine.start_profile(_PREFILLS * _most_steps(prompt))
    for _ in range(_PREFILLS):
        run(prompt, 1)
    prefill = engine.take_profile()
    engine.start_profile(tg + 1)  # one step reads the first token
    run(prompt[:1], tg + 1)
    decode = engine.take_profile()
    bounds = Bounds.measure(engine) if decode.device == "cpu" else None
    phases = {
        "decode": _phase(decode, "decode", bounds),
        "prefill": _phase(prefill, "prefill", bounds),
    }
    # Prompts come from Python one by one: only between decode steps is the engine by itself.
    gaps = decode.summary("decode")
    phases["decode"]["between_us"] = gaps["between_ns"] / max(gaps["between_count"], 1) / 1e3
    return {
        "device": decode.device,
        "read_bandwidth_bytes_s": bounds.read_bandwidth if bounds else None,
        "peak_ops_s": {k: rate for k, rate in bounds.peak_ops.items() if rate} if bounds else {},
        "threads": decode.threads,
        "layers": decode.num_layers,
        **phases,
    }


def traced_tokens(llm: LLM) -> int:
    return TRACED_DRAFTED if llm.engine.stats()["drafters"] else TRACED_TOKENS


def write_trace(llm: LLM, run: Run, prompt: list[int], path: Path) -> dict[str, float]:
    """The steps of one short request as a Chrome trace: the prompt, then a few tokens. First layers
    on a device of their own have tracks there. Of each model that drafts on a device of its own,
    which has some, too, the share of its time in which a step of the target ran."""
    engine, tokens = llm.engine, traced_tokens(llm)
    engine.start_profile(_most_steps(prompt) + tokens)
    run(prompt, tokens)
    target, front = {"target": engine.take_profile()}, engine.take_front_profile()
    if front is not None:
        parts = {"first": front, "last": target["target"]}
        target = {f"{part} layers on {p.device}": p for part, p in parts.items()}
    drafts = engine.take_draft_profiles()
    tracks = {**target, **drafts}
    text = target["target"].trace_json() if len(tracks) == 1 else _core.trace_json(tracks)
    path.write_text(text, encoding="utf-8")
    # Halves of a step take turns.
    return {
        name: sum(profile.overlapped_share(half) for half in target.values())
        for name, profile in drafts.items()
    }


def _most_steps(prompt: list[int]) -> int:
    """A prefill has no more steps, and memory is taken for so many: they are far longer than 64
    tokens."""
    return len(prompt) // 64 + 1


def _phase(profile: _core.Profile, phase: str, bounds: Bounds | None) -> dict[str, Any]:
    """Means over the steps of a phase."""
    total = profile.summary(phase)
    steps = total["steps"]
    barriers = total["barriers"] / steps
    return {
        "steps": steps,
        "tokens_per_step": total["tokens"] / steps,
        "step_us": total["step_ns"] / steps / 1e3,
        "host_us": total["host_ns"] / steps / 1e3,
        "barriers_per_step": barriers,
        "barriers_per_layer": barriers / max(profile.num_layers, 1),
        "kernels": [_kernel(row, total, bounds) for row in total["kernels"]],
    }


def _kernel(row: dict[str, Any], total: dict[str, Any], bounds: Bounds | None) -> dict[str, Any]:
    steps, seconds = total["steps"], max(row["time_ns"], 1) / 1e9
    bound, least = bounds.seconds(row) if bounds else (None, 0.0)
    return {
        "kernel": row["kernel"],
        "what": row["what"],
        "arithmetic": row["arithmetic"],
        "isa": row["isa"],
        "calls_per_step": row["calls"] / steps,
        "us_per_step": row["time_ns"] / steps / 1e3,
        "least_us": row["least_ns"] / 1e3,
        "share": row["time_ns"] / total["step_ns"],
        "wait_share": row["wait_ns"] / max(row["threads_ns"], 1),
        "bytes_per_step": row["bytes"] / steps,
        "bytes_s": row["bytes"] / seconds,
        "ops_per_step": row["ops"] / steps,
        "ops_s": row["ops"] / seconds,
        "bound": bound,
        "percent_of_bound": 100 * least / seconds if bounds else None,
    }


def print_profile(result: dict[str, Any]) -> None:
    """Tables on stderr."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    console.width = max(console.width, _WIDTH)
    console.print(_bounds_line(result))
    for phase in ("decode", "prefill"):
        console.print(_table(phase, result[phase]))
        console.print(_footnote(result[phase], result["layers"]))


def _bounds_line(result: dict[str, Any]) -> str:
    if result["read_bandwidth_bytes_s"] is None:
        return f"{result['device']}, timed by the device, call by call; its bounds are not measured"
    rates = [f"memory {result['read_bandwidth_bytes_s'] / 1e9:.1f} GB/s"]
    rates += [f"{name} {rate / 1e9:.0f} GOP/s" for name, rate in result["peak_ops_s"].items()]
    return f"bounds of {result['threads']} threads: {', '.join(rates)}"


def _table(phase: str, part: dict[str, Any]) -> Any:
    from rich import box
    from rich.table import Table

    title = f"{phase}: {part['steps']} steps of {part['tokens_per_step']:.0f} tokens, "
    table = Table(
        title=title + f"{part['step_us']:.0f} us each", title_justify="left", box=box.SIMPLE_HEAD
    )
    table.add_column("kernel", overflow="fold")
    for name in ("calls", "us", "least us", "%", "wait %", "MB", "GB/s", "GOP/s", "% of bound"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in part["kernels"]:
        table.add_row(
            f"{row['kernel']} {row['what']}",
            f"{row['calls_per_step']:.0f}",
            f"{row['us_per_step']:.1f}",
            f"{row['least_us']:.1f}",
            f"{100 * row['share']:.1f}",
            f"{100 * row['wait_share']:.0f}",
            f"{row['bytes_per_step'] / 1e6:.3f}",
            f"{row['bytes_s'] / 1e9:.1f}",
            f"{row['ops_s'] / 1e9:.1f}",
            "-" if row["bound"] is None else f"{row['percent_of_bound']:.0f} {row['bound']}",
        )
    return table


def _footnote(part: dict[str, Any], layers: int) -> str:
    between = f", {part['between_us']:.1f} us between steps" if "between_us" in part else ""
    return (
        f"{part['barriers_per_step']:.0f} barriers a step, {part['barriers_per_layer']:.1f} a "
        f"layer ({layers} layers); {part['host_us']:.1f} us of a step on the host{between}"
    )

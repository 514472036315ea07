"""Plots of docs/performance.md; nothing where matplotlib is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Okabe and Ito's palette, which colour-blind readers tell apart.
COLORS = {"effinfer": "#0072B2", "llama.cpp": "#D55E00", "openvino": "#009E73"}
MARKERS = {"effinfer": "o", "llama.cpp": "s", "openvino": "^"}

# section -> (file, axis of x, axis of y, title)
PLOTS = {
    "context": (
        "decode_context.png", "tokens of context", "tokens/s", "Decode against context"
    ),
    "batch": (
        "throughput_batch.png", "requests decoding together", "tokens/s, all requests",
        "Throughput against batch",
    ),
    "lengths": (
        "prefill_length.png", "tokens of prompt", "tokens/s", "Prefill against prompt length"
    ),
}  # fmt: skip


def series(engine: dict[str, Any]) -> list[tuple[int, dict[str, float]]]:
    """The measured points in order of x."""
    points = [
        (int(key), value)
        for key, value in engine.items()
        if key.isdigit() and isinstance(value, dict) and "median" in value
    ]
    return sorted(points, key=lambda point: point[0])


def draw(result: dict[str, Any], folder: Path) -> list[str]:
    """Writes a file for each section with points; their names."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        print("bench: no matplotlib, no plots", flush=True)
        return []
    matplotlib.use("Agg")
    written = []
    for section, (name, x_label, y_label, title) in PLOTS.items():
        engines = result["sections"].get(section, {}).get("engines", {})
        lines = {engine: series(engines[engine]) for engine in COLORS if engine in engines}
        if any(lines.values()):
            folder.mkdir(parents=True, exist_ok=True)
            draw_one(lines, folder / name, (x_label, y_label, title))
            written.append(name)
    return written


def draw_one(
    lines: dict[str, list[tuple[int, dict[str, float]]]], path: Path, labels: tuple[str, str, str]
) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), dpi=120)
    ticks: set[int] = set()
    for engine, points in lines.items():
        if not points:
            continue
        x = [point[0] for point in points]
        middle = [value["median"] for _, value in points]
        below = [value["median"] - value["min"] for _, value in points]
        above = [value["max"] - value["median"] for _, value in points]
        axes.errorbar(
            x, middle, yerr=[below, above], label=engine, color=COLORS[engine],
            marker=MARKERS[engine], linewidth=1.8, markersize=6, capsize=3,
        )  # fmt: skip
        ticks.update(x)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ticks), [str(tick) for tick in sorted(ticks)])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.set_title(labels[2])
    axes.grid(True, color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Software": None})
    pyplot.close(figure)

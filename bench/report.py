"""Tables of docs/performance.md from the results of run.py.

`python bench/report.py` writes them again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import goals
import store
from report_sections import section_text
from tables import rate, table

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "performance.md"

BUSY = 1.0  # load average before the run, above which the document says so


def speed_table(model: dict[str, Any], result: dict[str, Any]) -> str:
    header = [
        "engine",
        f"decode {result['decode_tokens']}, tok/s",
        f"prefill {result['prefill_tokens']}, tok/s",
        "load, s",
        "peak RSS, MB",
    ]
    rows, notes = [], []
    for name, engine in model["engines"].items():
        if "error" in engine:
            rows.append([name, "-", "-", "-", "-"])
            notes.append(f"{name} did not run this file: {engine['error']}")
            continue
        load = engine.get("load_s")
        peak = engine.get("peak_rss_bytes")
        rows.append(
            [
                name,
                rate(engine.get("decode_tok_s")),
                rate(engine.get("prefill_tok_s")),
                f"{load['median']:.2f}" if load else "-",
                f"{peak / 1e6:.0f}" if peak else "-",
            ]
        )
    for name, reason in result["missing_peers"].items():
        notes.append(f"{name}: {reason}")
    text = table(header, rows)
    return text + "".join(f"\n\n{note}" for note in notes)


def bound_line(model: dict[str, Any], result: dict[str, Any]) -> str:
    megabytes = model["weight_bytes"] / 1e6
    bandwidth = result["machine"]["read_bytes_per_s"]
    text = f"A token reads {megabytes:.0f} MB of weights"
    if not bandwidth:
        return text + "."
    bound = bandwidth / model["weight_bytes"]
    decode = model["engines"]["effinfer"].get("decode_tok_s")
    share = f"; effinfer reaches {100 * decode['median'] / bound:.0f} % of it" if decode else ""
    return (
        f"{text}: at the {bandwidth / 1e9:.1f} GB/s that plain reading reaches, "
        f"memory bounds decoding at {bound:.0f} tok/s{share}."
    )


def fidelity_table(model: dict[str, Any]) -> str:
    header = [
        "engine",
        "phase",
        "KL mean",
        "KL max",
        "perplexity",
        "against reference",
        "same best",
    ]
    rows = []
    for row in model["fidelity"]:
        if "error" in row:
            rows.append([row["engine"], row["phase"], row["error"], "-", "-", "-", "-"])
            continue
        change = row["perplexity"] / row["reference_perplexity"] - 1
        rows.append(
            [
                row["engine"],
                row["phase"],
                f"{row['kl_mean']:.2e}",
                f"{row['kl_max']:.2e}",
                f"{row['perplexity']:.4f}",
                f"{100 * change:+.3f} %",
                f"{100 * row['top1_agreement']:.1f} %",
            ]
        )
    return table(header, rows)


def machine_text(result: dict[str, Any]) -> str:
    about = result["machine"]
    engine = result["effinfer"]
    peers = {
        name: row["engine"]["version"]
        for model in result["models"]
        for name, row in model.get("engines", {}).items()
        if not name.startswith("effinfer") and "engine" in row
    }
    versions = ", ".join(f"{name} {version}" for name, version in peers.items()) or "no peer"
    parts = [*result["models"], *result["sections"].values()]
    counts = {part["repeats"] for part in parts if "repeats" in part} or {result["repeats"]}
    repeats = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{max(counts)}"
    text = (
        f"{about['cpu']}, {about['cores']} cores, {about['threads']} threads; effinfer "
        f"{engine['version']} at ISA level `{engine['isa']}`; {versions}; median (least to "
        f"greatest) of {repeats} repeats."
    )
    if about["load_average"] > BUSY:
        text += (
            f"\n\n**The machine was busy (load average {about['load_average']:.1f}): the speeds "
            "below are not worth quoting.**"
        )
    return text


def sections(result: dict[str, Any], others: Sequence[dict[str, Any]] = ()) -> dict[str, str]:
    """The parts of the page: of one machine all, of others what was aimed at."""
    parts = {"machine": machine_text(result)}
    speeds, distances = [], []
    for model in result["models"]:
        title = f"### {model['file']}"
        if "engines" in model:
            lines = [title, speed_table(model, result), bound_line(model, result)]
            speeds.append("\n\n".join(lines))
        if model.get("fidelity"):
            count = next((r["positions"] for r in model["fidelity"] if "positions" in r), 0)
            distances.append(f"{title}, {count} positions\n\n{fidelity_table(model)}")
    if speeds:
        parts["speed"] = "\n\n".join(speeds)
    if distances:
        parts["fidelity"] = "\n\n".join(distances)
    for name, section in result["sections"].items():
        parts[name] = section_text(name, section)
    parts["goals"] = goals_text(result)
    parts["others"] = "\n\n".join(
        f"### {other['machine']['cpu']}\n\n{machine_text(other)}\n\n{goals_text(other)}"
        for other in others
    )
    return parts


def goals_text(result: dict[str, Any]) -> str:
    return table(goals.HEADER, goals.rows(result))


def write(
    result: dict[str, Any], others: Sequence[dict[str, Any]] = (), document: Path = DOCUMENT
) -> None:
    """Replaces what lies between `<!-- NAME -->` and `<!-- /NAME -->` in the document."""
    text = document.read_text()
    for name, body in sections(result, others).items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not pattern.search(text):
            raise SystemExit(f"{document}: no section {name}")
        text = pattern.sub(lambda match, body=body: f"{match[1]}{body}\n{match[2]}", text)
    document.write_text(text)


if __name__ == "__main__":
    first, *others = store.by_coverage()
    write(first, others)

"""Tables of the sections that are measured on one model, and of the single operators."""

from __future__ import annotations

from typing import Any

import draft_models_report
import plots
import serving_report
import speculation_report
from tables import rate, table


def by_column(
    section: dict[str, Any], columns: list[str], title: str, scale: float = 1, digits: int = 1
) -> str:
    """An engine a row; below it the reasons of those that failed."""
    rows, notes = [], []
    for name, engine in section["engines"].items():
        rows.append([name, *(rate(engine.get(key), digits, scale) for key in columns)])
        if "error" in engine:
            notes.append(f"{name}: {engine['error']}")
    return "\n\n".join([table([title, *columns], rows), *notes])


def with_plot(text: str, section: str) -> str:
    name, _, _, title = plots.PLOTS[section]
    return f"{text}\n\n![{title}](plots/{name})"


def by_cell(section: dict[str, Any], scale: float = 1, digits: int = 0) -> str:
    """A question a row, an engine a column."""
    engines = section["engines"]
    keys = list(dict.fromkeys(
        key for engine in engines.values() for key, value in engine.items()
        if isinstance(value, dict)
    ))  # fmt: skip

    def cell(engine: dict[str, Any], key: str) -> str:
        value = engine.get(key, {})
        return f"{scale * value['median']:.{digits}f}" if "median" in value else "-"

    rows = [[key, *(cell(engine, key) for engine in engines.values())] for key in keys]
    return table(["", *engines], rows)


def section_text(name: str, section: dict[str, Any]) -> str:
    match name:
        case "context":
            columns = [str(depth) for depth in section["depths"]]
            return with_plot(by_column(section, columns, "tok/s at a context of"), name)
        case "batch":
            columns = [str(count) for count in section["requests"]]
            return with_plot(by_column(section, columns, "tok/s of requests together"), name)
        case "verify":
            columns = [str(count) for count in section["tokens"]]
            return by_column(section, columns, "ms of a step of tokens", scale=1e3, digits=2)
        case "threads":
            return by_column(section, ["decode", "prefill"], "tok/s")
        case "bitnet" | "large":
            return by_column(section, ["decode", "memory", "prefill"], "tok/s")
        case "serving":
            return serving_report.text(section)
        case "speculation":
            return speculation_report.text(section)
        case "draft_models":
            return draft_models_report.text(section)
        case "lengths":
            columns = [str(count) for count in section["prompts"]]
            return with_plot(by_column(section, columns, "tok/s of a prompt of"), name)
        case "matmul":
            return by_cell(section)
        case "ternary" | "attention" | "sampling" | "library":
            return by_cell(section, scale=1e6)
        case _:
            raise KeyError(name)

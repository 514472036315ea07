"""The section `draft_models` of docs/performance.md: its table and its goals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from goal_row import Row
from tables import rate, table

Json = dict[str, Any]

LEAST_OVERLAP = 0.8
MOST_FIRST_TOKEN = 1.05


def text(section: Json) -> str:
    header = ["target, text, drafts", "against", "its tok/s", "with drafts, tok/s", "gain",
              "tokens a step", "rows a step", "accepted", "predicted gain"]  # fmt: skip
    rows = []
    for key, row in section["rows"].items():
        share = row["share"]
        hoped = f"{row['predicted']['median']:.2f}x; {share['median']:.0%}" if share else "-"
        rows.append([
            key, row["against"], f"{row['before']['median']:.1f}", f"{row['tok_s']['median']:.1f}",
            rate(row["ratio"], 2), f"{row['tokens_a_step']:.2f}", f"{row['rows_a_step']:.2f}",
            f"{row['accepted']:.0%}", hoped,
        ])  # fmt: skip
    return table(header, rows)


def draft_model_rows(section: Json) -> Iterator[Row]:
    for key, row in section["rows"].items():
        ours, other = row["tok_s"]["median"], row["before"]["median"]
        yield Row(f"drafts: {key}", f"{ours:.1f} tok/s", f"{row['against']} {other:.1f}",
                  row["ratio"]["median"], row["goal"])  # fmt: skip
        if row["share"]:
            yield Row(
                f"drafts: {key}: gain against what acceptance and costs predict",
                f"{row['ratio']['median']:.2f}x", f"{row['predicted']['median']:.2f}x",
                row["share"]["median"], row["share_goal"], unit="%",
            )  # fmt: skip
        if "overlapped" in row:
            yield Row(f"drafts: {key}: share of drafting beside steps of the target", "-", "-",
                      row["overlapped"]["median"], LEAST_OVERLAP, unit="%")  # fmt: skip
    if first := section["first_token"]:
        small, plain = (1e3 * first[name]["median"] for name in ("small", "plain"))
        yield Row("drafts: T, time to the first token with a draft model", f"{small:.0f} ms",
                  f"plain {plain:.0f} ms", first["ratio"]["median"], MOST_FIRST_TOKEN,
                  at_most=True)  # fmt: skip

"""The section `speculation` of docs/performance.md: its tables and its goals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from goal_row import Row
from tables import rate, table

Json = dict[str, Any]

LEAST_SHARE = 0.9  # of what acceptance and the costs of rows predict
LEAST_PEER = {  # llama.cpp with prompt lookup, on the same text
    "B, code edit, replayed": 3.5,
    "S, code edit, replayed": 4.0,
}
MOST_BOOKKEEPING = 0.03
MOST_TREE = 1.08
NOTHING = "nothing to hit"


def text(section: Json) -> str:
    parts = [gain_table(section), peer_table(section), eight_table(section)]
    return "\n\n".join(part for part in parts if part)


def gain_table(section: Json) -> str:
    header = ["text", "drafts", "plain, tok/s", "with drafts, tok/s", "gain", "tokens a step",
              "rows a step", "accepted", "predicted gain", "distinct 4-grams"]  # fmt: skip
    rows = []
    for key, row in section["rows"].items():
        for name, found in row["drafts"].items():
            share = found["share"]
            hoped = f"{found['predicted']['median']:.2f}x; {share['median']:.0%}" if share else "-"
            rows.append([
                key, name, f"{row['plain_tok_s']['median']:.1f}",
                f"{found['tok_s']['median']:.1f}", rate(found["ratio"], 2),
                f"{found['tokens_a_step']:.2f}", f"{found['rows_a_step']:.2f}",
                f"{found['accepted']:.0%}", hoped,
                f"{row['distinct']['min']:.0%} to {row['distinct']['max']:.0%} of {row['texts']}",
            ])  # fmt: skip
    return table(header, rows)


def guesses(lookup: str) -> str:
    return f"prompt lookup of {lookup}" if lookup != "0" else "plain"


def peer_table(section: Json) -> str:
    rows = [
        [key, guesses(lookup), rate(theirs["tok_s"]), rate(theirs["ratio"], 2)]
        for key, row in section["rows"].items()
        for lookup, theirs in row["llama.cpp"].items()
    ]
    header = ["text", "llama.cpp", "its tok/s", "effinfer's rate with drafts over it"]
    return table(header, rows) if rows else ""


def eight_table(section: Json) -> str:
    rows = [
        [model, rate(found["tree"], 3), rate(found["bookkeeping"], 1, 100)]
        for model, found in section["eight"].items()
    ]
    header = ["eight rows", "tree over chain", "time for drafts, % of a plain step"]
    return table(header, rows) if rows else ""


def speculation_rows(section: Json) -> Iterator[Row]:
    shares = []
    for key, row in section["rows"].items():
        for name in named(key, row):
            found = row["drafts"][name]
            worst = NOTHING in key
            many = f", the worst of {len(row['drafts'])} proposers" if worst else ""
            yield Row(
                f"drafts: {key}{many}: {name}", f"{found['tok_s']['median']:.1f} tok/s",
                f"plain {row['plain_tok_s']['median']:.1f}", found["ratio"]["median"], row["goal"],
            )  # fmt: skip
            if found["share"]:
                shares.append((found["share"]["median"], f"{key}, {name}", found))
            yield from peer_row(key, row, found)
    if shares:
        share, key, found = min(shares, key=lambda item: item[0])
        yield Row(
            f"drafts: gain against what acceptance and rows' times predict, the least of "
            f"{len(shares)}: {key}", f"{found['ratio']['median']:.2f}x",
            f"{found['predicted']['median']:.2f}x", share, LEAST_SHARE, unit="%",
        )  # fmt: skip
    for model, found in section["eight"].items():
        tree, drafting = found["tree"]["median"], found["bookkeeping"]["median"]
        yield Row(f"drafts: {model}, a tree of 8 rows against a chain", "-", "-", tree, MOST_TREE,
                  at_most=True)  # fmt: skip
        yield Row(f"drafts: {model}, bookkeeping of 8 rows, share of a plain step", "-", "-",
                  drafting, MOST_BOOKKEEPING, at_most=True, unit="%")  # fmt: skip


def named(key: str, row: Json) -> list[str]:
    """The proposers that have a goal of their own: where there is nothing to hit, the worst."""
    if NOTHING not in key:
        return list(row["drafts"])
    return [min(row["drafts"], key=lambda name: row["drafts"][name]["ratio"]["median"])]


def peer_row(key: str, row: Json, found: Json) -> Iterator[Row]:
    """Against the better of llama.cpp's lookups."""
    lookups = {name: theirs for name, theirs in row["llama.cpp"].items() if name != "0"}
    if key not in LEAST_PEER or not lookups:
        return
    name, theirs = min(lookups.items(), key=lambda item: item[1]["ratio"]["median"])
    yield Row(
        f"drafts: {key}", f"{found['tok_s']['median']:.1f} tok/s",
        f"llama.cpp, {guesses(name)}, same replay {theirs['tok_s']['median']:.1f}",
        theirs["ratio"]["median"], LEAST_PEER[key],
    )  # fmt: skip

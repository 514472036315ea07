"""A row of the summary at the top of docs/performance.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    what: str
    ours: str
    other: str
    ratio: float
    goal: float
    bound: str = ""
    at_most: bool = False  # a ratio to stay under
    unit: str = "x"

    def cells(self) -> list[str]:
        met = self.ratio <= self.goal if self.at_most else self.ratio >= self.goal
        form = "{:.0%}".format if self.unit == "%" else "{:.2f}x".format
        sign = "<=" if self.at_most else ">="
        goal = form(self.goal)
        verdict = "yes" if met else "no"
        return [self.what, self.ours, self.other, form(self.ratio), f"{sign} {goal}", verdict,
                self.bound or "-"]  # fmt: skip

"""Tables in Markdown, and numbers in their cells."""

from __future__ import annotations


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["-"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def rate(value: dict[str, float] | None, digits: int = 1, scale: float = 1) -> str:
    if not value or "median" not in value:
        return "-"
    low, middle, high = (scale * value[key] for key in ("min", "median", "max"))
    return f"**{middle:.{digits}f}** ({low:.{digits}f} to {high:.{digits}f})"

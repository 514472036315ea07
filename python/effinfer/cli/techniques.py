"""effinfer techniques."""

from dataclasses import fields, is_dataclass
from typing import Annotated, Any

import typer

from effinfer.cli import options as o
from effinfer.cli.output import print_json
from effinfer.techniques import REGISTRY, Technique
from effinfer.techniques.registry import defaults_of, meta_of

Name = Annotated[str | None, typer.Argument(help="One of them, in full.")]


@o.expanded()
def techniques(name: Name = None, as_json: o.JsonOption = False) -> None:
    """Published methods that effinfer has, and what they do to texts."""
    if name is not None:
        meta_of(name)  # throws for another name
    rows = [_row(each) for each in (REGISTRY if name is None else [name])]
    if as_json:
        print_json(rows if name is None else rows[0])
    elif name is None:
        widths = [max(len(row[key]) for row in rows) for key in ("name", "family", "effect")]
        for row in rows:
            parts = zip(("name", "family", "effect"), widths, strict=True)
            print("  ".join([f"{row[key]:<{width}}" for key, width in parts] + [row["paper"]]))
    else:
        print("\n".join(_lines(rows[0])))


def _row(name: str) -> dict[str, Any]:
    meta, kind = meta_of(name), REGISTRY[name]
    return {
        "name": name,
        "class": kind.__name__,
        "taken_by": "techniques" if issubclass(kind, Technique) else "speculation",
        **{field.name: getattr(meta, field.name) for field in fields(meta) if field.name != "name"},
        "fields": defaults_of(kind) if is_dataclass(kind) else {},
    }


def _lines(row: dict[str, Any]) -> list[str]:
    number = f", arXiv:{row['arxiv']}" if row["arxiv"] else ""
    lines = [f"{row['name']} ({row['class']}): {row['paper']}{number}"]
    for key in ("family", "effect", "primitives", "needs", "exclusive", "dense_limit", "differs"):
        value = row[key]
        text = ", ".join(value) if isinstance(value, tuple) else value
        if text:
            lines.append(f"  {key.replace('_', ' ')}: {text}")
    return lines + [f"  {name} = {default}" for name, default in row["fields"].items()]

"""Writes docs/catalogue.md from the META of every technique; with --check it exits 1 where the page
is stale. Needs no build: nothing of the native core runs, so a stand-in takes its place."""

import argparse
import re
import sys
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "catalogue.md"
PAGES = ("techniques.md", "speculation.md")

HEAD = """# Catalogue

Every technique of the package, by family. This page is generated from their `META` by
`tools/make_catalogue.py`; `effinfer techniques NAME` prints an entry with the fields of its class.

*lossless* leaves the text, or its distribution, what it is; *approximate* does not; *trained* is
for models that were trained for it. *Decides alone*: two techniques that name the same thing there
are refused together, with a `ConflictError`.
"""
MATRIX = """
## Together

A technique of each family that `LLM(techniques=[...])` takes, with one of each other: **yes**, or
what both want to decide.
"""


class _AnyName(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnyName(name, (Exception,), {})


class _Core(types.ModuleType):
    """effinfer._core, whose every name is a class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _AnyName(name, (Exception,), {})
        setattr(self, name, found)
        return found


def registry() -> dict[str, type[Any]]:
    sys.path.insert(0, str(ROOT / "python"))
    sys.modules["effinfer._core"] = _Core("effinfer._core")
    from effinfer.techniques.registry import REGISTRY

    return REGISTRY


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def described_in(kind: type[Any]) -> str:
    """The page that says where it differs from its paper, and has what was measured."""
    name = re.compile(rf"\b{kind.__name__}\b")
    for page in PAGES:
        if name.search((ROOT / "docs" / page).read_text()):
            return f"[{page.removesuffix('.md')}]({page})"
    raise SystemExit(f"{kind.__name__}: expected it in one of {', '.join(PAGES)}")


def table(family: str, kinds: dict[str, type[Any]]) -> list[str]:
    lines = [
        f"## {family}",
        "",
        "| name | class | paper | effect | primitives | needs | decides alone | differs | more |",
        "|-|-|-|-|-|-|-|-|-|",
    ]
    for name, kind in kinds.items():
        meta = kind.META
        paper = cell(meta.paper)
        if meta.arxiv:
            paper += f" ([{meta.arxiv}](https://arxiv.org/abs/{meta.arxiv}))"
        cells = [
            f"`{name}`",
            f"`{kind.__name__}`",
            paper,
            meta.effect,
            ", ".join(meta.primitives),
            ", ".join(meta.needs),
            ", ".join(meta.exclusive),
            "" if meta.differs.startswith("docs/") else cell(meta.differs),
            described_in(kind),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def matrix(kinds: dict[str, type[Any]]) -> list[str]:
    """Of the first of each family that is a Technique."""
    from effinfer.techniques.technique import Technique

    first: dict[str, type[Any]] = {}
    for kind in kinds.values():
        if issubclass(kind, Technique):
            first.setdefault(kind.META.family, kind)
    families = sorted(first)
    lines = ["| | " + " | ".join(families) + " |", "|-" * (len(families) + 1) + "|"]
    for row in families:
        cells = []
        for column in families:
            shared = set(first[row].META.exclusive) & set(first[column].META.exclusive)
            cells.append(", ".join(sorted(shared)) if shared else "yes")
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return lines


def page() -> str:
    kinds = registry()
    lines = [HEAD]
    for family in sorted({kind.META.family for kind in kinds.values()}):
        of_family = {name: kind for name, kind in kinds.items() if kind.META.family == family}
        lines += [*table(family, of_family), ""]
    return "\n".join([*lines[:-1], MATRIX, *matrix(kinds)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    wanted = page()
    if not parser.parse_args().check:
        PAGE.write_text(wanted)
    elif not PAGE.is_file() or PAGE.read_text() != wanted:
        sys.exit("docs/catalogue.md is stale: run tools/make_catalogue.py")


if __name__ == "__main__":
    main()

"""Enforces the size budgets: files, functions, line width. Exits 1 and lists what is over."""

import ast
import re
import sys
from pathlib import Path

from source_files import ROOT, source_files

MAX_FILE = 500
MAX_KERNEL = 299
MAX_PACKAGE_MODULE = 250
KERNELS = Path("csrc/cuda/bodies")
MAX_FUNCTION = 80
MAX_WIDTH = 100
GENERATED = {Path("python/effinfer/_core.pyi")}
# Of a member, behind the first one of a constructor.
INITIALISER = re.compile(r" {8}\w+_[({]")
CONTROL = re.compile(r"\s*(\}?\s*else|if|for|while|switch|do|try|namespace|class|struct|enum)\b")


def python_functions(text: str) -> list[tuple[int, int]]:
    """(first line, lines) of each function."""
    return [
        (node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def cpp_functions(text: str) -> list[tuple[int, int]]:
    """The same for C++, by its format: a body opens with a line that ends in `{` and closes with
    the next `}` of the same indentation."""
    found = []
    lines = text.splitlines()
    for start, line in enumerate(lines):
        if not line.endswith("{") or ")" not in line or CONTROL.match(line):
            continue
        # The line that opens the body may continue a parameter list or the initialisers of a
        # constructor: its head is less indented.
        first = start
        while first > 0 and lines[first].startswith("    ") and "(" not in lines[first]:
            first -= 1
        while first > 0 and INITIALISER.match(lines[first]):
            first -= 1
        while first > 0 and lines[first].lstrip().startswith(": "):
            first -= 1
        indent = re.match(r" *", lines[first]).group()
        for end in range(start + 1, len(lines)):
            if lines[end].startswith(indent + "}"):
                found.append((first + 1, end - first + 1))
                break
    return found


def problems_of(path: Path) -> list[str]:
    text = (ROOT / path).read_text()
    lines = text.splitlines()
    budget = MAX_FILE
    if path.parts[0] == "python":
        budget = MAX_PACKAGE_MODULE
    elif KERNELS in path.parents:
        budget = MAX_KERNEL
    problems = []
    if len(lines) > budget:
        problems.append(f"{path}: {len(lines)} lines, budget {budget}")
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_WIDTH:
            problems.append(f"{path}:{number}: {len(line)} columns, budget {MAX_WIDTH}")
    for first, size in (python_functions if path.suffix == ".py" else cpp_functions)(text):
        if size > MAX_FUNCTION:
            problems.append(f"{path}:{first}: function of {size} lines, budget {MAX_FUNCTION}")
    return problems


def main() -> None:
    files = set(source_files("*.cpp", "*.h", "*.cu", "*.cuh", "*.py")) - GENERATED
    problems = [problem for path in sorted(files) for problem in problems_of(path)]
    print("\n".join(problems) if problems else f"sizes: {len(files)} files within budget")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()

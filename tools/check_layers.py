"""Checks the layers of csrc/: who may include whom, and what public headers may name.

    core < io < ops < cpu < cuda < graph < weights < kv < executor < compiler < runtime < bindings

A file includes its own layer and those to its left. Public headers (csrc/include/effinfer) are
below all and include nothing else of the project. They declare only types that one of them defines,
except `struct Impl;` and its like inside a class. Exits 1 and prints `file:line: message`.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYERS = (
    "core",
    "io",
    "ops",
    "cpu",
    "cuda",
    "graph",
    "weights",
    "kv",
    "executor",
    "compiler",
    "runtime",
    "bindings",
)
PUBLIC = "effinfer"
PUBLIC_NAMESPACES = {"effinfer", "ops", "effinfer::ops"}

INCLUDE = re.compile(r'\s*#\s*include\s+"([^"]+)"')
NAMESPACE = re.compile(r"(?:inline )?namespace ([\w:]+) \{")
# Nothing is indented in a namespace: what is, stands in a class.
DECLARATION = re.compile(r"(?:struct|class|union|enum(?: class)?) (\w+)(?:\s*:\s*\w+)?;")
DEFINITION = re.compile(
    r"^\s*(?:struct|class|union|enum(?: class)?) (?:EFFINFER_API )?(\w+)[^;{]*\{", re.MULTILINE
)

# (file, what it includes or declares): why that is right, or until when it stays.
ALLOWED = {
    ("csrc/include/effinfer/threads.h", "TeamShared"): (
        "the pool's own state, behind a reference: a team is a handle on it"
    ),
    ("csrc/cuda/entry.h", "gpu/host_unit.h"): (
        "the emulator of the tests, where the host's compiler compiles kernels"
    ),
}

Problem = tuple[str, int, str, str]  # file, line, what it names, message


def sources(root: Path) -> list[Path]:
    return sorted(
        path for path in (root / "csrc").rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh")
    )


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    yield from enumerate(path.read_text().splitlines(), 1)


def include_problem(layer: str, included: str) -> str | None:
    """Why a file of `layer` ("include" is that of public headers) may not include it."""
    target = included.split("/")[0]
    if target == PUBLIC:
        return None
    if layer == "include":
        return f'a public header includes "{included}", which is not installed'
    if target not in LAYERS:
        return f'"{included}" is in no layer: spell it from csrc/'
    if LAYERS.index(target) > LAYERS.index(layer):
        return f'{layer}/ includes "{included}", and {target}/ is above it'
    return None


def include_problems(root: Path) -> Iterator[Problem]:
    for path in sources(root):
        file = path.relative_to(root).as_posix()
        layer = path.relative_to(root / "csrc").parts[0]
        if layer != "include" and layer not in LAYERS:
            yield file, 1, layer, f"csrc/{layer}/ is no layer: expected one of {', '.join(LAYERS)}"
            continue
        for number, line in lines_of(path):
            found = INCLUDE.match(line)
            message = found and include_problem(layer, found[1])
            if found and message:
                yield file, number, found[1], message


def public_problems(root: Path) -> Iterator[Problem]:
    headers = sorted((root / "csrc/include").rglob("*.h"))
    defined = {name for path in headers for name in DEFINITION.findall(path.read_text())}
    for path in headers:
        file = path.relative_to(root).as_posix()
        for number, line in lines_of(path):
            space = NAMESPACE.match(line)
            if space and space[1] not in PUBLIC_NAMESPACES:
                yield file, number, space[1], f"a public header opens the namespace {space[1]}"
            declared = DECLARATION.match(line)
            if declared and declared[1] not in defined:
                message = f"a public header declares {declared[1]}, which none defines"
                yield file, number, declared[1], message


def check(root: Path, allowed: dict[tuple[str, str], str]) -> list[str]:
    """`file:line: message` of everything that is wrong; exceptions that nothing needs are wrong."""
    problems = [*include_problems(root), *public_problems(root)]
    found = {(file, name) for file, _, name, _ in problems}
    messages = [
        f"{file}:{line}: {message}"
        for file, line, name, message in problems
        if (file, name) not in allowed
    ]
    messages += [
        f"{file}:1: nothing needs the exception for {name} in tools/check_layers.py"
        for file, name in allowed
        if (file, name) not in found
    ]
    return messages


def main() -> None:
    messages = check(ROOT, ALLOWED)
    print("\n".join(messages) if messages else f"layers: {len(sources(ROOT))} files in order")
    sys.exit(1 if messages else 0)


if __name__ == "__main__":
    main()

"""Writes python/effinfer/_core.pyi from the built module, with pybind11-stubgen.

The generator's output is then made strict: exceptions are classes of the stub, `= None` parameters
are optional, numbers are int and float, arrays and containers have parameters.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from source_files import ROOT

TARGET = ROOT / "python" / "effinfer" / "_core.pyi"
MODULE = "effinfer._core"

# Plain rewrites of types, in this order.
REWRITES = [
    (r"    __hash__: typing\.ClassVar\[None\] = None\n", ""),
    (r"typing\.SupportsInt \| typing\.SupportsIndex", "int"),
    (r"typing\.SupportsFloat \| typing\.SupportsIndex", "float"),
    (r"\bnumpy\.ndarray\b(?!\[)", "numpy.typing.NDArray[typing.Any]"),
    (r"(?<=: )dict(?= =|,|\))|(?<=-> )dict(?=:)", "dict[str, typing.Any]"),
    (r"(?<=-> )list(?=:)", "list[typing.Any]"),
    (r"(?<=: )list(?=,|\)| =)", "list[typing.Any]"),
    (r"(?<=-> )tuple(?=:)", "tuple[typing.Any, ...]"),
    (r"(?<=: )tuple(?=,|\)| =)", "tuple[typing.Any, ...]"),
    (r"(: )(?!typing\.Any\b)([\w.]+(?:\[[^=]*?\])?) = None", r"\1\2 | None = None"),
    (r"(: )typing\.Any \| None = None", r"\1typing.Any = None"),
]


def generate() -> str:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pybind11_stubgen", MODULE, "-o", folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return (Path(folder) / "effinfer" / "_core.pyi").read_text()


def exception_classes() -> str:
    from effinfer import _core

    found = [
        value
        for value in vars(_core).values()
        if isinstance(value, type) and issubclass(value, Exception)
    ]
    lines = []
    for error in sorted(found, key=lambda error: (len(error.__mro__), error.__name__)):
        bases = ", ".join(base.__name__ for base in error.__bases__)
        lines.append(f"class {error.__name__}({bases}): ...")
    return "\n".join(lines)


def make_strict(text: str) -> str:
    text = re.sub(r"^from effinfer import \w+\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^__all__.*\n", exception_classes() + "\n", text, flags=re.MULTILINE)
    for pattern, replacement in REWRITES:
        text = re.sub(pattern, replacement, text)
    return text


def main() -> None:
    TARGET.write_text(make_strict(generate()))
    subprocess.run([sys.executable, "-m", "ruff", "format", "-q", str(TARGET)], check=True)
    print(f"{TARGET.relative_to(ROOT)}: written")


if __name__ == "__main__":
    main()

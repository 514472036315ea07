"""docs/add_an_op.md tells the truth: which sources name an operator, and that they are few."""

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "add_an_op.md"
# What uses an operator, and is no part of adding one.
USERS = "python/effinfer/models/"


def code_of_cpp(text: str) -> str:
    return re.sub(r"//.*", "", text)


def code_of_python(text: str) -> str:
    """`text` without comments and without docstrings."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    kept = (
        token.string
        for token in tokens
        if token.type != tokenize.COMMENT and not token.string.startswith('"""')
    )
    return " ".join(kept)


CODE_OF = {".h": code_of_cpp, ".cpp": code_of_cpp, ".cu": code_of_cpp, ".py": code_of_python}


def sources_naming(name: str, root: Path = ROOT) -> set[str]:
    """The C++ and Python sources in whose code the regular expression `name` is found."""
    found = set()
    for folder in ("csrc", "python/effinfer"):
        for path in sorted((root / folder).rglob("*")):
            code_of = CODE_OF.get(path.suffix)
            if code_of is not None and re.search(name, code_of(path.read_text())):
                found.add(path.relative_to(root).as_posix())
    return found


def sources_listed(heading: str) -> set[str]:
    """The first column of the table of sources under a heading of the page."""
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `((?:csrc|python)/\S+)` \|", section, re.MULTILINE))


def of_csrc(sources: set[str]) -> set[str]:
    return {source for source in sources if source.startswith("csrc/")}


def of_gpus(sources: set[str]) -> set[str]:
    return {source for source in sources if source.startswith("csrc/cuda/")}


def test_an_elementwise_operator_takes_few_sources():
    named = {s for s in sources_naming(r"\bsigmoid\b") if not s.startswith(USERS)}
    assert named == sources_listed("Element by element")
    assert len(named - of_gpus(named)) <= 10
    assert len(of_gpus(named)) == 1


def test_an_operator_with_a_kernel_takes_few_sources():
    named = sources_naming(r"\b(merge_states|MergeStates)")
    assert named == sources_listed("Any other operator")
    assert len(of_csrc(named) - of_gpus(named)) <= 6
    assert len(of_gpus(named)) <= 2


@pytest.mark.parametrize("operator", ["relu_squared", "gelu_tanh", "softcap"])
def test_sigmoid_is_no_exception(operator):
    named = {s for s in sources_naming(rf"\b{operator}\b") if not s.startswith(USERS)}
    assert 0 < len(named - of_gpus(named)) <= 10
    assert len(of_gpus(named)) == 1


def test_only_code_counts(tmp_path):
    files = {
        "csrc/a.h": "// swish\nint swishing;\n",
        "csrc/b.cpp": 'int x; // swish\nconst char* y = "swish";\n',
        "python/effinfer/c.py": '"""swish\n\nswish"""\nx = 1  # swish\n',
        "python/effinfer/d.py": 'NAMES = ["swish"]\n',
        "python/effinfer/e.pyi": "def swish() -> None: ...\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert sources_naming(r"\bswish\b", tmp_path) == {"csrc/b.cpp", "python/effinfer/d.py"}

"""The examples of docs/operators.md run as they stand."""

import re
from pathlib import Path

import pytest

from effinfer import ops

PAGE = Path(__file__).parents[2] / "docs" / "operators.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def title(example: str) -> str:
    """The heading that the example stands under."""
    before = PAGE.read_text().partition(example)[0]
    return re.findall(r"^#+ (.*)$", before, re.MULTILINE)[-1].replace(" ", "-")


@pytest.mark.parametrize("example", EXAMPLES, ids=title)
def test_example(example):
    exec(compile(example, str(PAGE), "exec"), {})


def test_there_are_examples():
    assert len(EXAMPLES) >= 5


def test_every_operator_is_listed():
    listed = set(re.findall(r"\b\w+\b", " ".join(re.findall(r"`[^`\n]+`", PAGE.read_text()))))
    bases = {name.removesuffix("_inplace") for name in ops.__all__}
    assert bases <= listed

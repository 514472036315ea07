"""The committed types of the native module are those of the built one."""

from pathlib import Path

import pytest

import effinfer
from effinfer import _core
from tests.python.signatures import describe_module, describe_stub, differences

STUB = Path(effinfer.__file__).parent / "_core.pyi"


def compare(text: str) -> list[str]:
    return differences(describe_stub(text), describe_module(_core))


def test_the_stub_is_that_of_the_module():
    assert compare(STUB.read_text()) == [], "run `make stubs`"


POOL = "def __init__(self, threads: int = 0, *, oversubscribe: bool = False) -> None:"
MIN_P = "    @min_p.setter\n    def min_p(self, arg0: float) -> None: ...\n"


@pytest.mark.parametrize(
    ("old", "new", "wrong"),
    [
        (POOL, POOL.replace("threads", "count"), "ThreadPool.__init__"),
        (POOL, POOL.replace("threads: int = 0, ", ""), "ThreadPool.__init__"),
        (POOL, POOL.replace(", *", ""), "ThreadPool.__init__"),
        (POOL, POOL.replace("int = 0", "int = 1"), "ThreadPool.__init__"),
        (POOL, POOL.replace("int = 0", "int"), "ThreadPool.__init__"),
        (POOL, POOL.replace("threads: int", "threads: float"), "ThreadPool.__init__"),
        (POOL, POOL.replace("threads: int", "threads: typing.Any"), "ThreadPool.__init__"),
        (POOL, POOL.replace("False)", "False, more: int = 0)"), "ThreadPool.__init__"),
        ("def version() -> str: ...", "def version() -> int: ...", "version"),
        ("def version() -> str: ...", "", "version"),
        ("def version() -> str: ...", "def version() -> str: ...\ndef other(): ...", "other"),
        ("def size(self) -> int: ...", "def size(self) -> str: ...", "DeviceArray.size"),
        ("    @property\n    def size(self)", "    def size(self)", "DeviceArray.size"),
        (MIN_P, "", "SamplingParams.min_p"),
        (MIN_P, MIN_P.replace("float", "int"), "SamplingParams.min_p"),
        ("    ignore_eos: bool\n", "", "SamplingParams.ignore_eos"),
        ("    ignore_eos: bool\n", "    ignore_eos: int\n", "SamplingParams.ignore_eos"),
        ("ClassVar[int] = 64", "ClassVar[int] = 16", "KvCache.page_size"),
        ("class LayeredWeights(MemoryWeights)", "class LayeredWeights", "LayeredWeights"),
        ("class GgufStrings:", "class Strings:", "Strings"),
        ("    @staticmethod\n", "", "DeviceArray.empty"),
    ],
)
def test_a_wrong_stub_is_found(old, new, wrong):
    text = STUB.read_text()
    assert old in text
    found = compare(text.replace(old, new, 1))
    assert wrong in {line.partition(":")[0] for line in found}

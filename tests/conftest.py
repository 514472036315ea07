"""Fixtures that all tests share."""

from collections.abc import Iterator

import pytest

from effinfer.testing import available_isas
from effinfer.testing import isa as isa_level

# Those that take a minute or more come first, or at the end one process would wait for another.
LONG = (
    "models/test_fidelity.py",
    "techniques/test_sparse_decode.py",
    "techniques/test_prefill.py",
    "models/test_invariance.py",
    "techniques/test_on_gpu.py",
    "techniques/test_kv_features.py",
    "techniques/test_pair.py",
    "ops/test_on_gpu.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.path.as_posix().endswith(LONG))


@pytest.fixture(params=available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once at each instruction-set level of the machine; the value is its name."""
    with isa_level(request.param):
        yield request.param

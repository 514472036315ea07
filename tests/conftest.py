"""Fixtures that all tests share."""

from collections.abc import Iterator

import pytest

from effinfer.testing import available_isas
from effinfer.testing import isa as isa_level


@pytest.fixture(params=available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once at each instruction-set level of the machine; the value is its name."""
    with isa_level(request.param):
        yield request.param

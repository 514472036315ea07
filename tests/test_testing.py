"""The helpers that tests rely on: ISA levels and tolerances."""

import numpy as np
import pytest

from effinfer import _core, testing
from tests.tolerance import F32_EPS, assert_close, dot_magnitude


def test_isa_is_set_and_restored():
    before = _core.current_isa()
    with testing.isa("portable"):
        assert _core.current_isa() == "portable"
    assert _core.current_isa() == before


def test_isa_is_restored_after_an_error():
    before = _core.current_isa()
    with pytest.raises(RuntimeError, match="inside"), testing.isa("portable"):
        raise RuntimeError("inside")
    assert _core.current_isa() == before


def test_unknown_isa_is_an_error_and_changes_nothing():
    before = _core.current_isa()
    with pytest.raises(_core.InvalidArgumentError, match="expected portable"), testing.isa("mmx"):
        pass
    assert _core.current_isa() == before


def test_isa_fixture_sets_the_level(isa):
    assert _core.current_isa() == isa
    assert isa in testing.available_isas()


def test_assert_close_accepts_float32_rounding():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 300), np.float32)
    w = rng.standard_normal((7, 300), np.float32)
    expected = x.astype(np.float64) @ w.T.astype(np.float64)
    assert_close(x @ w.T, expected, terms=300, magnitude=dot_magnitude(x, w))


@pytest.mark.parametrize("wrong", [1 + 8 * F32_EPS, np.nan, np.inf])
def test_assert_close_rejects(wrong):
    with pytest.raises(AssertionError, match="1 of 3 values"):
        assert_close([1.0, wrong, 2.0], [1.0, 1.0, 2.0])

"""Frequencies and tables of rotary position embeddings."""

import math

import numpy as np
import pytest

from effinfer import _core, ops
from tests.tolerance import F32_EPS, assert_close

# What ROPE_INIT_FUNCTIONS of the transformers package (5.23, torch on CPU) return for heads of 32.
LLAMA3 = {"theta": 500000.0, "scaling": "llama3", "factor": 32.0, "original_max_position": 8192}
YARN = {"theta": 1e6, "scaling": "yarn", "factor": 4.0, "original_max_position": 32768}
LINEAR = {"theta": 10000.0, "scaling": "linear", "factor": 3.0}
EXPECTED = [
    (
        LLAMA3,
        [
            1.0000000e00, 4.4036663e-01, 1.9392276e-01, 8.5397102e-02, 3.7606031e-02, 1.6560441e-02,
            7.2926651e-03, 3.2114461e-03, 4.2955671e-04, 1.9461639e-05, 8.5702559e-06,
            3.7740544e-06, 1.6619674e-06, 7.3187493e-07, 3.2229329e-07, 1.4192720e-07,
        ],
    ),
    (
        YARN,
        [
            1.0000000e00, 4.2169651e-01, 1.7782794e-01, 7.4989416e-02, 3.1622779e-02, 1.3335215e-02,
            4.7799014e-03, 1.6599617e-03, 5.5000000e-04, 1.6867858e-04, 4.4456985e-05,
            1.8747356e-05, 7.9056936e-06, 3.3338035e-06, 1.4058534e-06, 5.9284343e-07,
        ],
    ),
    (
        LINEAR,
        [
            3.33333343e-01, 1.87447116e-01, 1.05409257e-01, 5.92759810e-02, 3.33333351e-02,
            1.87447090e-02, 1.05409259e-02, 5.92759810e-03, 3.33333318e-03, 1.87447108e-03,
            1.05409266e-03, 5.92759810e-04, 3.33333359e-04, 1.87447105e-04, 1.05409265e-04,
            5.92759789e-05,
        ],
    ),
]  # fmt: skip


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def reference_frequencies(dims, theta, scaling="none", factor=1.0, original_max_position=0.0):
    """The definitions in float64: Llama 3.1's and that of YaRN, arXiv:2309.00071 section 3."""
    plain = theta ** (-np.arange(0, dims, 2) / dims)
    if scaling == "linear":
        return plain / factor
    turns = original_max_position * plain / (2 * np.pi)
    if scaling == "llama3":
        keep = np.clip((turns - 1) / (4 - 1), 0, 1)
    elif scaling == "yarn":
        ends = [
            dims * math.log(original_max_position / (beta * 2 * np.pi)) / (2 * math.log(theta))
            for beta in (32, 1)
        ]
        low, high = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), dims - 1)
        keep = 1 - np.clip((np.arange(dims // 2) - low) / (high - low), 0, 1)
    else:
        return plain
    return plain * keep + plain / factor * (1 - keep)


@pytest.mark.parametrize(("parameters", "expected"), EXPECTED, ids=["llama3", "yarn", "linear"])
def test_frequencies_are_those_of_transformers(parameters, expected):
    inv_freq, _ = ops.rope_frequencies(32, **parameters)
    np.testing.assert_array_equal(inv_freq, np.array(expected, np.float32))


@pytest.mark.parametrize("dims", [2, 6, 64, 80, 256])
@pytest.mark.parametrize("parameters", [{"theta": 10000.0}, LLAMA3, YARN, LINEAR])
def test_frequencies_match_float64(dims, parameters):
    inv_freq, factor = ops.rope_frequencies(dims, **parameters)
    # The exponent's rounding is multiplied by ln(theta), the ramps' by the context length in turns.
    assert_close(inv_freq, reference_frequencies(dims, **parameters), terms=64)
    expected = 0.1 * math.log(4) + 1 if parameters is YARN else 1.0
    assert abs(factor - expected) <= F32_EPS


def test_attention_factor_and_divisors():
    assert ops.rope_frequencies(32, attention_factor=0.5, **YARN)[1] == 0.5
    divisors = np.linspace(1, 8, 16, dtype=np.float32)
    plain, _ = ops.rope_frequencies(32)
    np.testing.assert_array_equal(ops.rope_frequencies(32, divisors=divisors)[0], plain / divisors)


def test_table_is_correctly_rounded(isa):
    positions = np.array([0, 1, 2, 100, 8191, 131071, 2**24], np.int32)
    inv_freq, _ = ops.rope_frequencies(64)
    table = ops.rope_table(positions, inv_freq)
    angles = (positions.astype(np.float32)[:, None] * inv_freq).astype(np.float64)
    expected = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    np.testing.assert_array_max_ulp(table, expected, 1)
    scaled = ops.rope_table(positions, inv_freq, 1.25)
    np.testing.assert_array_equal(scaled, table * np.float32(1.25))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"dims": 3}, "dims: expected a positive even number, got 3"),
        ({"dims": 0}, "dims: expected a positive even number, got 0"),
        ({"theta": 0.0}, "theta: expected a positive number"),
        ({"theta": math.inf}, "theta: expected a positive number"),
        ({"scaling": "cubic"}, "scaling: expected none, linear, llama3 or yarn, got .cubic"),
        ({"scaling": "linear", "factor": 0.0}, "factor: expected a positive number"),
        ({"scaling": "llama3"}, "original_max_position: expected a positive number"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor: expected more than"),
        ({**YARN, "theta": 1.0}, "theta: expected another number than 1"),
        ({**YARN, "beta_fast": -1.0}, "beta_fast: expected a positive number"),
        ({**YARN, "attention_factor": -1.0}, "attention_factor: expected a number >= 0"),
        ({"divisors": random(0, 5)}, r"divisors: expected shape \[4\], got \[5\]"),
    ],
)
def test_frequency_errors(parameters, message):
    with pytest.raises(_core.InvalidArgumentError, match=message):
        ops.rope_frequencies(**{"dims": 8, **parameters})


def test_positions_outside_int32_are_an_error():
    inv_freq, _ = ops.rope_frequencies(8)
    for positions in (np.array([1, 2**40]), np.array([-(2**31) - 1])):
        with pytest.raises(
            _core.InvalidArgumentError, match=r"\[rope_table\] positions\[\d\]: expe"
        ):
            ops.rope_table(positions, inv_freq)
    with pytest.raises(_core.InvalidArgumentError, match=r"positions: expected dtype i32, got f32"):
        ops.rope_table(random(0, 3), inv_freq)

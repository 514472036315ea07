"""Gated activations, over rows of every float type."""

import numpy as np
import pytest
import torch

from effinfer import InvalidArgumentError, _core, ops
from tests.ops.rows import DTYPES, assert_rounded, random

WIDTHS = [0, 1, 2, 15, 16, 17, 33, 576, 4097, 9001]


def exact(name, x):
    """In float64: erf and the sigmoid of torch."""
    gate = torch.from_numpy(x)
    if name == "silu_and_mul":
        return torch.nn.functional.silu(gate).numpy()
    form = "none" if name == "gelu_and_mul" else "tanh"
    return torch.nn.functional.gelu(gate, approximate=form).numpy()


every_op = pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@every_op
@every_dtype
@pytest.mark.parametrize("width", WIDTHS)
def test_matches_float64(isa, name, dtype, width):
    x = random(width, 3, 2 * width, dtype=dtype, spread=4)
    gate, up = x[:, :width].astype(np.float64), x[:, width:].astype(np.float64)
    # 1 + erf and 1 + tanh cancel for negative gates: errors are relative to |gate| there.
    assert_rounded(
        getattr(ops, name)(x),
        exact(name, gate) * up,
        dtype,
        terms=4,
        magnitude=np.abs(gate * up),
    )


@every_op
def test_extremes(isa, name):
    gates = np.array([0.0, -0.0, 1e-30, -1e-30, 9, -9, 88, -88, 150, -150, 1e18, -1e18], np.float32)
    out = getattr(ops, name)(np.stack([gates, np.ones_like(gates)], axis=1))[:, 0]
    assert_rounded(
        out, exact(name, gates.astype(np.float64)), "float32", terms=9, magnitude=np.abs(gates)
    )
    assert np.isnan(getattr(ops, name)(np.array([np.nan, 1], np.float32))).all()


@every_op
@every_dtype
def test_strides_shapes_and_teams(isa, name, dtype):
    op = getattr(ops, name)
    x = random(1, 4, 5, 200, dtype=dtype)
    expected = op(x)
    assert expected.shape == (4, 5, 100)
    np.testing.assert_array_equal(op(x.reshape(20, 200)), expected.reshape(20, 100))
    np.testing.assert_array_equal(op(x[1, 2]), expected[1, 2])
    wide = np.concatenate([x, x], axis=2)
    np.testing.assert_array_equal(op(wide[:, ::2, :200]), expected[:, ::2])
    out = np.empty_like(expected)
    pool = _core.ThreadPool(3, oversubscribe=True)
    assert op(x, out, pool=pool) is out
    np.testing.assert_array_equal(out, expected)


def test_torch_in_torch_out():
    x = torch.randn(6, 64).to(torch.bfloat16)
    out = ops.silu_and_mul(x)
    expected = torch.nn.functional.silu(x[:, :32].float()) * x[:, 32:].float()
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected.to(torch.bfloat16), rtol=2**-7, atol=0)


@every_op
@pytest.mark.parametrize(
    ("x", "out", "message"),
    [
        (random(0, 2, 7), None, r"input: expected an even last dimension, got shape \[2, 7\]"),
        (np.array(1, np.float32), None, "input: expected at least one dimension"),
        (np.zeros((2, 8), np.int8), None, "input: expected dtype f32, f16 or bf16, got i8"),
        (random(0, 2, 16)[:, ::2], None, "input: expected a contiguous last dimension"),
        (random(0, 2, 8), random(0, 2, 8), r"out: expected float32 \(2, 4\), got float32 \(2, 8\)"),
        ([1.0, 2.0], None, "input: expected a numpy array"),
    ],
)
def test_errors(name, x, out, message):
    with pytest.raises(InvalidArgumentError, match=rf"\[{name}\] " + message):
        getattr(ops, name)(x, out)

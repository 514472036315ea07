"""Products with packed weights on a GPU."""

import numpy as np
import pytest

from effinfer import InvalidArgumentError, UnsupportedError, ops
from tests.ops.cuda.gpu_arrays import here, there
from tests.ops.rows import random
from tests.ops.test_matmul import pack

X = random(0, 5, 128)
TABLE = random(1, 40, 128)
BIAS, RESIDUAL = random(2, 40), random(3, 5, 40)


@pytest.mark.parametrize("arithmetic", ["f32", "bf16"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_products(arithmetic, dtype):
    table = TABLE.astype(dtype)
    weight = ops.pack(table)
    there_weight = weight.to("cuda:0")
    assert there_weight.device == "cuda:0"
    assert there_weight.to("cuda:0").device == "cuda:0"
    assert weight.device == "cpu"
    expected = X.astype(np.float64) @ table.astype(np.float64).T
    tolerance = {"rtol": 0, "atol": 1e-4 if arithmetic == "f32" else 0.3}
    plain = ops.quantized_matmul(there(X), there_weight, arithmetic)
    np.testing.assert_allclose(here(plain), expected, **tolerance)
    more = {"bias": there(BIAS), "residual": there(RESIDUAL)}
    out = ops.quantized_matmul(there(X), there_weight, arithmetic, **more)
    np.testing.assert_allclose(here(out), expected + BIAS + RESIDUAL, **tolerance)
    assert here(ops.quantized_matmul(there(X[:0]), there_weight, arithmetic)).shape == (0, 40)


@pytest.mark.parametrize("dtype", ["q4_0", "q5_1", "q8_0", "q2_k", "q4_k", "q6_k"])
def test_int8_has_the_bits_of_the_cpu(dtype):
    weight, _ = pack(dtype, 40, 512)
    x = random(5, 9, 512)
    expected = ops.quantized_matmul(x, weight, bias=BIAS, residual=random(6, 9, 40))
    moved = weight.to("cuda:0")
    got = ops.quantized_matmul(there(x), moved, bias=there(BIAS), residual=there(random(6, 9, 40)))
    np.testing.assert_array_equal(here(got), expected)


def test_what_is_refused():
    weight = ops.pack(TABLE)
    moved = weight.to("cuda")
    x = there(X)
    for call, error, message in (
        (lambda: ops.quantized_matmul(x, weight, "f32"), InvalidArgumentError,
         "weight: expected a matrix on cuda:0, got one on cpu"),
        (lambda: ops.quantized_matmul(X, moved, "f32"), InvalidArgumentError,
         "weight: expected a matrix on cpu, got one on cuda:0"),
        (lambda: ops.quantized_matmul(x, moved), UnsupportedError,
         "an int8 operand needs quantised weights"),
        (lambda: ops.quantized_matmul(x, moved, "f32", bias=BIAS), InvalidArgumentError,
         r"bias: expected f32 \[40\] on cuda:0, got f32 \[40\] on cpu"),
        (lambda: ops.quantized_matmul(x[:, :64], moved, "f32"), InvalidArgumentError, "x: expect"),
        (moved.unpack, InvalidArgumentError, "weight: expected a matrix on cpu, got one on cuda:0"),
        (lambda: weight.to("cuda:4"), InvalidArgumentError, 'expected "cpu", "cuda:0"'),
    ):  # fmt: skip
        with pytest.raises(error, match=r"(.|\n)*" + message):
            call()

"""Operators as torch's: opcheck and whole graphs of torch.compile."""

import numpy as np
import pytest
import torch

from effinfer import InvalidArgumentError, ops
from effinfer.integrations.torch import QuantizedLinear

operators = torch.ops.effinfer
HEADS = (torch.randn(5, 4, 16), torch.randn(5, 2, 16))
FLAT = (torch.randn(5, 64), torch.randn(5, 32))
RAGGED = (torch.tensor([0, 2, 5]), torch.tensor([7, 0]))
POSITIONS = torch.arange(5)
STATES = (torch.randn(5, 4, 16), torch.randn(5, 4))
KEYS = (torch.randn(9, 2, 16).bfloat16(), torch.randn(9, 2, 32).bfloat16())
PROBS = torch.rand(3, 50).softmax(-1)
ROWS, WEIGHT = torch.randn(3, 8), torch.randn(8)

SAMPLES = {
    "rmsnorm": (ROWS, WEIGHT),
    "gemma_rmsnorm": (ROWS.bfloat16(), WEIGHT.bfloat16(), 1e-5),
    "fused_add_rmsnorm": (ROWS, torch.randn(3, 8), WEIGHT),
    "gemma_fused_add_rmsnorm": (ROWS.half(), ROWS.half() + 1, WEIGHT),
    "layernorm": (ROWS.bfloat16(), WEIGHT, WEIGHT),
    "silu_and_mul": (ROWS,),
    "gelu_and_mul": (ROWS.bfloat16(),),
    "gelu_tanh_and_mul": (ROWS.T.contiguous().T[:, :0],),
    "apply_rope": (*HEADS, *RAGGED, 8),
    "apply_rope_inplace": (*HEADS, *RAGGED),
    "apply_rope_pos_ids": (*HEADS, POSITIONS, None, True),
    "apply_rope_pos_ids_inplace": (*HEADS, POSITIONS),
    "apply_llama31_rope": (*HEADS, *RAGGED),
    "apply_llama31_rope_inplace": (*HEADS, *RAGGED),
    "apply_llama31_rope_pos_ids": (*HEADS, POSITIONS),
    "apply_llama31_rope_pos_ids_inplace": (*HEADS, POSITIONS),
    "apply_rope_with_cos_sin_cache": (POSITIONS, *FLAT, 16, torch.randn(9, 8)),
    "apply_rope_with_cos_sin_cache_inplace": (POSITIONS, *FLAT, 16, torch.randn(9, 8), False),
    "packbits": (torch.tensor([True, False, True]), "little"),
    "single_decode_with_kv_cache": (torch.randn(4, 16).bfloat16(), *KEYS),
    "single_prefill_with_kv_cache": (torch.randn(3, 4, 16).bfloat16(), *KEYS),
    "merge_state": (*STATES, STATES[0] + 1, STATES[1] - 1),
    "merge_states": (torch.randn(5, 3, 4, 16).half(), torch.randn(5, 3, 4)),
    "softmax": (ROWS.half(),),
    "top_k_renorm_probs": (PROBS, 7),
    "top_p_renorm_probs": (PROBS, 0.5),
    "top_k_mask_logits": (PROBS, 7),
    "segment_packbits": (torch.ones(5, dtype=torch.bool), RAGGED[0]),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name):
    arguments = tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in SAMPLES[name])
    torch.library.opcheck(getattr(operators, name).default, arguments)


@pytest.mark.parametrize("name", SAMPLES)
def test_results_are_those_of_ops(name):
    given, expected = (
        tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in SAMPLES[name])
        for _ in range(2)
    )
    got, want = getattr(operators, name)(*given), getattr(ops, name)(*expected)
    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    same = [x for x in expected if isinstance(x, torch.Tensor)]
    torch.testing.assert_close([got, *tensors], [want, *same], rtol=0, atol=0)


def test_attention_with_options():
    q, (k, v) = torch.randn(3, 4, 16).bfloat16(), KEYS
    mask = torch.rand(3, 9) < 0.5
    options = {"custom_mask": mask, "sm_scale": 0.5, "logits_soft_cap": 2.0}
    torch.library.opcheck(operators.single_prefill_with_kv_cache.default, (q, k, v), options)
    got = operators.single_prefill_with_kv_cache(q, k, v, **options)
    want = ops.single_prefill_with_kv_cache(q, k, v, **options)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_sampling_is_a_function_of_its_seed():
    operator = operators.top_k_top_p_sampling_from_logits
    arguments, options = (torch.randn(6, 40), 20, 0.9), {"seed": 3, "offset": 1}
    torch.library.opcheck(operator.default, arguments, options)
    want = ops.top_k_top_p_sampling_from_logits(*arguments, **options)
    torch.testing.assert_close(operator(*arguments, **options), want, rtol=0, atol=0)


def block(x, residual, weight, linear, positions):
    x, residual = x.clone(), residual.clone()
    operators.fused_add_rmsnorm(x, residual, weight)
    gated = operators.silu_and_mul(linear(x))
    heads = gated.reshape(-1, 2, 16)
    q, k = operators.apply_rope_pos_ids(heads, heads * 2, positions)
    return operators.rmsnorm(q + k, weight[:16]), residual


def test_a_whole_graph_compiles():
    weight = torch.randn(32, requires_grad=True)
    packed = ops.pack(np.random.default_rng(0).standard_normal((64, 32), np.float32))
    linear = QuantizedLinear(packed, torch.randn(64), "f32")
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    for rows in (6, 9, 1):
        x, residual = torch.randn(rows, 32), torch.randn(rows, 32)
        arguments = (x, residual, weight, linear, torch.arange(rows))
        with torch.no_grad():
            torch.testing.assert_close(compiled(*arguments), block(*arguments), rtol=0, atol=0)


def test_quantized_linear():
    weight = torch.randn(24, 40)
    packed = ops.pack(weight)
    linear = QuantizedLinear(packed, arithmetic="f32")
    arguments = (torch.randn(3, 40), linear.number, 24, None, "f32")
    torch.library.opcheck(operators.quantized_matmul.default, arguments)
    x = torch.randn(2, 3, 40).bfloat16()
    out = linear(x)
    assert out.dtype == torch.bfloat16
    expected = (x.float() @ weight.T).bfloat16()
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=2**-7)
    assert "40, 24" in repr(linear)
    number = linear.number
    del linear, packed
    with pytest.raises(InvalidArgumentError, match=r"\[quantized_matmul\] matrix: expected the n"):
        operators.quantized_matmul(torch.randn(3, 40), number, 24, None, "f32")


def test_errors_are_effinfers():
    with pytest.raises(InvalidArgumentError, match=r"\[rmsnorm\] weight: expected shape \[8\]"):
        operators.rmsnorm(ROWS, WEIGHT[:7])

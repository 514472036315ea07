"""Operators as torch's: opcheck and whole graphs of torch.compile."""

import numpy as np
import pytest
import torch

from effinfer import InvalidArgumentError, ops
from effinfer.integrations.torch import Attention, QuantizedLinear

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
    "gelu_tanh_and_mul": (ROWS[:, :6],),  # rows with a gap between them
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


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


CACHES = (torch.randn(6, 4, 2, 16).bfloat16(), torch.randn(6, 4, 2, 16).bfloat16())
PAGES = (i32(0, 2, 3), i32(4, 1, 0), i32(3, 4))  # 7 and 4 tokens


def decode():
    wrapper = ops.BatchDecodeWithPagedKVCacheWrapper()
    wrapper.plan(*PAGES, 4, 2, 16, 4)
    return wrapper, torch.randn(2, 4, 16).bfloat16(), CACHES


def decode_of_one_array():
    wrapper, q, (k, v) = decode()
    return wrapper, q, (torch.stack([k, v], 1),)


def prefill():
    wrapper = ops.BatchPrefillWithPagedKVCacheWrapper()
    wrapper.plan(i32(0, 3, 5), *PAGES, 4, 2, 16, 4, causal=True)
    return wrapper, torch.randn(5, 4, 16).bfloat16(), CACHES


def ragged():
    wrapper = ops.BatchPrefillWithRaggedKVCacheWrapper()
    wrapper.plan(i32(0, 3, 5), i32(0, 3, 9), 4, 2, 16, head_dim_vo=32)
    return wrapper, torch.randn(5, 4, 16).bfloat16(), KEYS


def cascade():
    wrapper = ops.MultiLevelCascadeAttentionWrapper(2)
    shared, own = (i32(0, 2), i32(2, 3), i32(4)), (i32(0, 1, 2), i32(0, 1), i32(1, 4))
    pages = zip(shared, own, strict=True)
    wrapper.plan([i32(0, 2), i32(0, 1, 2)], *map(list, pages), 4, 2, 16, 4)
    return wrapper, torch.randn(2, 4, 16).bfloat16(), CACHES


def blocks():
    wrapper = ops.BlockSparseAttentionWrapper()
    wrapper.plan(i32(0, 1, 2), i32(1, 0), 4, 6, 2, 3, 4, 2, 16)
    return wrapper, torch.randn(4, 4, 16), (torch.randn(6, 2, 16), torch.randn(6, 2, 16))


def variable_blocks():
    wrapper = ops.VariableBlockSparseAttentionWrapper()
    sizes = (i32(3, 1).reshape(1, 2), i32(2, 4).reshape(1, 2))
    wrapper.plan(torch.eye(2, dtype=torch.bool)[None], *sizes, 2, 1, 16)
    return wrapper, torch.randn(2, 4, 16), (torch.randn(1, 6, 16), torch.randn(1, 6, 16))


def latent():
    wrapper = ops.BatchMLAPagedAttentionWrapper()
    pages = (*PAGES[:2], i32(7, 4))
    wrapper.plan(i32(0, 1, 2), *pages, 3, 32, 16, 4, causal=False, sm_scale=0.2)
    caches = torch.randn(6, 4, 32), torch.randn(6, 4, 16)
    return wrapper, torch.randn(2, 3, 32), (torch.randn(2, 3, 16), *caches)


@pytest.mark.parametrize(
    "make",
    [decode, decode_of_one_array, prefill, ragged, cascade, blocks, variable_blocks, latent],
)
def test_wrappers(make):
    wrapper, q, keys = make()
    attention = Attention(wrapper, return_lse=True, lse_base="ln")
    arguments = (q, list(keys), attention.number, "ln")
    torch.library.opcheck(operators.planned_attention.default, arguments)
    paged = make in (decode, prefill, cascade)
    want = wrapper.run(q, *((keys,) if paged else keys), return_lse=True, lse_base="ln")
    torch.testing.assert_close(attention(q, *keys), want, rtol=0, atol=0)
    assert torch.equal(Attention(wrapper)(q, *keys), want[0])


def step(attention, q, k, v, k_cache, v_cache, places, pages):
    operators.append_paged_kv_cache(k, v, *places, k_cache, v_cache, *pages)
    return attention(q * 2, k_cache, v_cache) + 1


def test_a_step_with_a_cache_compiles():
    """A plan of other lengths is a plan of the same graph."""
    wrapper = ops.BatchDecodeWithPagedKVCacheWrapper()
    attention = Attention(wrapper)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    caches = [cache.clone() for cache in CACHES]
    expected = [cache.clone() for cache in CACHES]
    for last in ((1, 2), (2, 3), (3, 4)):
        pages = (i32(4, 1, 0), i32(0, 2, 3), i32(*last))
        wrapper.plan(pages[1], pages[0], pages[2], 4, 2, 16, 4)
        places = (i32(0, 1), i32(4 + last[0] - 1, last[1] - 1))
        q, k, v = (torch.randn(2, heads, 16).bfloat16() for heads in (4, 2, 2))
        got = compiled(attention, q, k, v, *caches, places, pages)
        want = step(attention, q, k, v, *expected, places, pages)
        torch.testing.assert_close([got, *caches], [want, *expected], rtol=0, atol=0)
    assert not torch.equal(caches[0], CACHES[0])


def test_a_wrapper_that_is_gone():
    wrapper, q, keys = decode()
    number = Attention(wrapper).number
    del wrapper
    with pytest.raises(InvalidArgumentError, match=r"wrapper: expected the number of a living At"):
        operators.planned_attention(q, list(keys), number, "ln")


def test_errors_are_effinfers():
    with pytest.raises(InvalidArgumentError, match=r"\[rmsnorm\] weight: expected shape \[8\]"):
        operators.rmsnorm(ROWS, WEIGHT[:7])

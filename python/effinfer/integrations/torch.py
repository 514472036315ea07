"""Operators of `effinfer.ops` as torch operators, for torch.compile: `import` it to register them.

    import effinfer.integrations.torch
    y = torch.ops.effinfer.rmsnorm(x, weight)

They have the names and arguments of `effinfer.ops` without `out` and `pool`, run on CPU tensors and
have no gradients. `QuantizedLinear` is a torch.nn.Module over a `PackedMatrix`, `Attention` one
over a wrapper with a plan.
"""

from typing import Any

import torch

from effinfer import ops
from effinfer._core import PackedMatrix
from effinfer.integrations.torch_attention import Attention
from effinfer.integrations.torch_library import Numbers, register

__all__ = ["Attention", "QuantizedLinear"]


def _like(*places: int) -> Any:
    """A fake whose results are dense tensors like the arguments at those places."""

    def fake(*args: Any, **_: Any) -> Any:
        results = tuple(args[place].new_empty(args[place].shape) for place in places)
        return results if len(places) > 1 else results[0]

    return fake


def _halved(input: torch.Tensor) -> torch.Tensor:
    return input.new_empty((*input.shape[:-1], input.shape[-1] // 2))


def _packed(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    return x.new_empty(((x.shape[0] + 7) // 8,), dtype=torch.uint8)


def _packed_segments(
    x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big"
) -> tuple[torch.Tensor, torch.Tensor]:
    size = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty((size,), dtype=torch.uint8), torch.empty_like(indptr)


_NORM = "(Tensor input, Tensor weight, float eps=1e-6) -> Tensor"
_FUSED_NORM = "(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float eps=1e-6) -> ()"
_SCALING = "int? rotary_dim=None, bool interleave=False, float rope_scale=1, float rope_theta=1e4"
_LLAMA31 = (
    "int? rotary_dim=None, bool interleave=False, float rope_scale=8, float rope_theta=5e5, "
    "float low_freq_factor=1, float high_freq_factor=4, int old_context_len=8192"
)
_CACHE = "int head_size, Tensor cos_sin_cache, bool is_neox=True"

for _name in ("rmsnorm", "gemma_rmsnorm"):
    register(_name + _NORM, getattr(ops, _name), _like(0))
for _name in ("fused_add_rmsnorm", "gemma_fused_add_rmsnorm"):
    register(_name + _FUSED_NORM, getattr(ops, _name), None)
register(
    "layernorm(Tensor input, Tensor gemma, Tensor beta, float eps=1e-6) -> Tensor",
    ops.layernorm,
    _like(0),
)
for _name in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"):
    register(_name + "(Tensor input) -> Tensor", getattr(ops, _name), _halved)
for _name, _parameters in (("apply_rope", _SCALING), ("apply_llama31_rope", _LLAMA31)):
    for _suffix, _places in (
        ("", "Tensor indptr, Tensor offsets"),
        ("_pos_ids", "Tensor pos_ids"),
    ):
        _full = _name + _suffix
        register(
            f"{_full}(Tensor q, Tensor k, {_places}, {_parameters}) -> (Tensor, Tensor)",
            getattr(ops, _full),
            _like(0, 1),
        )
        register(
            f"{_full}_inplace(Tensor(a!) q, Tensor(b!) k, {_places}, {_parameters}) -> ()",
            getattr(ops, f"{_full}_inplace"),
            None,
        )
register(
    "apply_rope_with_cos_sin_cache(Tensor positions, Tensor query, Tensor key, "
    f"{_CACHE}) -> (Tensor, Tensor)",
    ops.apply_rope_with_cos_sin_cache,
    _like(1, 2),
)
register(
    "apply_rope_with_cos_sin_cache_inplace(Tensor positions, Tensor(a!) query, Tensor(b!) key, "
    f"{_CACHE}) -> ()",
    ops.apply_rope_with_cos_sin_cache_inplace,
    None,
)
register('packbits(Tensor x, str bitorder="big") -> Tensor', ops.packbits, _packed)
register(
    'segment_packbits(Tensor x, Tensor indptr, str bitorder="big") -> (Tensor, Tensor)',
    ops.segment_packbits,
    _packed_segments,
)

_SCORES = "float? sm_scale=None, int window_left=-1, float? logits_soft_cap=None"


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


def _merged(v: torch.Tensor, s: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, _states, heads, dims = v.shape
    return v.new_empty((tokens, heads, dims)), s.new_empty((tokens, heads))


def _probabilities(logits: torch.Tensor, *_: Any) -> torch.Tensor:
    return logits.new_empty(logits.shape, dtype=torch.float32)


def _tokens(logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return logits.new_empty((logits.shape[0],), dtype=torch.int32)


register(
    f'single_decode_with_kv_cache(Tensor q, Tensor k, Tensor v, str kv_layout="NHD", *, {_SCORES})'
    " -> Tensor",
    ops.single_decode_with_kv_cache,
    _attention,
)
register(
    "single_prefill_with_kv_cache(Tensor q, Tensor k, Tensor v, *, Tensor? custom_mask=None, "
    f'bool causal=False, str kv_layout="NHD", {_SCORES}) -> Tensor',
    ops.single_prefill_with_kv_cache,
    _attention,
)
register(
    "merge_state(Tensor v_a, Tensor s_a, Tensor v_b, Tensor s_b, *, "
    'str lse_base="log2") -> (Tensor, Tensor)',
    ops.merge_state,
    _like(0, 1),
)
register(
    'merge_states(Tensor v, Tensor s, *, str lse_base="log2") -> (Tensor, Tensor)',
    ops.merge_states,
    _merged,
)
register("softmax(Tensor logits) -> Tensor", ops.softmax, _probabilities)
register("top_k_renorm_probs(Tensor probs, int top_k) -> Tensor", ops.top_k_renorm_probs, _like(0))
register(
    "top_p_renorm_probs(Tensor probs, float top_p) -> Tensor", ops.top_p_renorm_probs, _like(0)
)
register("top_k_mask_logits(Tensor logits, int top_k) -> Tensor", ops.top_k_mask_logits, _like(0))
# A seed is required: the tokens are a function of the arguments, as torch expects of an operator.
register(
    "top_k_top_p_sampling_from_logits(Tensor logits, int top_k, float top_p, *, "
    "int seed, int offset=0) -> Tensor",
    ops.top_k_top_p_sampling_from_logits,
    _tokens,
)

_matrices = Numbers("[quantized_matmul] matrix", "QuantizedLinear")


def _quantized_matmul(
    x: torch.Tensor, matrix: int, out_features: int, bias: torch.Tensor | None, arithmetic: str
) -> torch.Tensor:
    return ops.quantized_matmul(x, _matrices[matrix], arithmetic, bias=bias)


def _product(
    x: torch.Tensor, matrix: int, out_features: int, bias: torch.Tensor | None, arithmetic: str
) -> torch.Tensor:
    return x.new_empty((x.shape[0], out_features))


register(
    "quantized_matmul(Tensor x, int matrix, int out_features, Tensor? bias, str arithmetic) "
    "-> Tensor",
    _quantized_matmul,
    _product,
)


class QuantizedLinear(torch.nn.Module):
    """x @ weight.T + bias over a packed, possibly quantised weight; for inference.

    Args:
        weight: of `effinfer.ops.pack`. It is no parameter: state_dict() does not hold it.
        bias: float32 [out_features].
        arithmetic: as of `effinfer.ops.quantized_matmul`.

    x [..., in_features] of any float type is computed with as float32; the result is of its type.
    """

    bias: torch.Tensor | None

    def __init__(
        self, weight: PackedMatrix, bias: torch.Tensor | None = None, arithmetic: str = "int8"
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.arithmetic = arithmetic
        self.weight = weight
        self.number = _matrices.add(weight)
        self.register_buffer("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features).to(torch.float32)
        product: torch.Tensor = torch.ops.effinfer.quantized_matmul(
            rows, self.number, self.out_features, self.bias, self.arithmetic
        )
        return product.reshape(*x.shape[:-1], self.out_features).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.weight.dtype}"

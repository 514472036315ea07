"""Sampling: FlashInfer's functions on CPU, with its argument order, defaults and result shapes.

Rows of logits or probs are [batch, vocab], float32, float16 or bfloat16. Parameters of rows
(`temperature`, `top_k`, `top_p`, `min_p`) are a number, or an array with one value for each output.

Each filter keeps a head of the order (probability descending, token id ascending): top-k exactly k
tokens, top-p (arXiv:1904.09751) the smallest head that reaches the mass, min-p (arXiv:2407.01082)
what is at least min_p times as likely as the likeliest. (FlashInfer keeps every token that ties
with the last one, and finds top-p's threshold to within a tolerance.) No filter sorts, and none
is slower on flat rows than a few passes over them.

Random numbers come from a counter-based generator: `seed` and `offset` decide, and an output's
place in the batch; where `seed` is an array [batch], each output draws from its own seed at its own
offset, and a row's token does not depend on the batch that it is in. Neither does it depend on the
number of threads or the instruction set. Without `seed` it comes from `generator`
(numpy.random.Generator or torch.Generator), else, for torch tensors, from torch's default
generator, else from the system: such draws cannot be repeated.

`indices` int32 or int64 [outputs] names the row that each output draws from; the result has its
dtype. `deterministic`, `enable_pdl` and `is_deterministic` change nothing: results always are.
NaNs are always refused, whatever `check_nan` says; so are rows that have no distribution, unless
`return_valid` asks for (samples, valid), where such rows give token 0 and False.

On a GPU rows that would be refused give token 0 and probabilities 0, and nobody waits; with
`check_nan` the host waits and refuses them. `top_k` and `indices` may be int32 or int64 there,
other arrays of parameters are float32 or int64. Tokens are the CPU's, but where a draw falls within
rounding of a bound.
"""

from typing import Any

from effinfer import _core
from effinfer._core import Queue, ThreadPool
from effinfer.ops.renorm import (
    apply_token_bitmask,
    chain_speculative_sampling,
    top_k_mask_logits,
    top_k_renorm_probs,
    top_p_renorm_probs,
)
from effinfer.ops.shared.row_arguments import filter_rows, sample
from effinfer.ops.topk import top_k

__all__ = [
    "apply_token_bitmask",
    "chain_speculative_sampling",
    "min_p_sampling_from_probs",
    "sampling_from_logits",
    "sampling_from_probs",
    "softmax",
    "top_k",
    "top_k_mask_logits",
    "top_k_renorm_probs",
    "top_k_sampling_from_probs",
    "top_k_top_p_sampling_from_logits",
    "top_k_top_p_sampling_from_probs",
    "top_p_renorm_probs",
    "top_p_sampling_from_probs",
]

_ORDERS = ("top_k_first", "joint")


def _is_joint(op: str, filter_apply_order: str) -> bool:
    if filter_apply_order not in _ORDERS:
        raise _core.InvalidArgumentError(
            f"[{op}] filter_apply_order: expected one of {_ORDERS}, got {filter_apply_order!r}"
        )
    return filter_apply_order == "joint"


def _draw(indices: Any, generator: Any, seed: Any, offset: Any, check_nan: bool) -> dict[str, Any]:
    draw = {"indices": indices, "generator": generator, "seed": seed, "offset": offset}
    return {**draw, "check_nan": check_nan}


def softmax(
    logits: Any,
    temperature: Any = None,
    enable_pdl: bool | None = None,
    *,
    pool: ThreadPool | Queue | None = None,
) -> Any:
    """softmax(logits / temperature) in float32, [batch, vocab]; temperature > 0."""
    return filter_rows(
        "softmax", "logits", logits, "probs", dtype="float32", temperature=temperature, pool=pool
    )


def sampling_from_logits(
    logits: Any,
    indices: Any = None,
    deterministic: bool = True,
    generator: Any = None,
    check_nan: bool = False,
    seed: Any = None,
    offset: Any = None,
    *,
    pool: ThreadPool | Queue | None = None,
) -> Any:
    """A token of each row of softmax(logits): int32 [batch]."""
    draw = _draw(indices, generator, seed, offset, check_nan)
    return sample("sampling_from_logits", "logits", logits, pool=pool, **draw)


def sampling_from_probs(
    probs: Any,
    indices: Any = None,
    deterministic: bool = True,
    generator: Any = None,
    check_nan: bool = False,
    seed: Any = None,
    offset: Any = None,
    return_valid: bool = False,
    *,
    pool: ThreadPool | Queue | None = None,
) -> Any:
    """A token of each row of probs, which need not sum to 1: int32 [batch]."""
    draw = _draw(indices, generator, seed, offset, check_nan)
    return sample("sampling_from_probs", "probs", probs, return_valid=return_valid, pool=pool,
                  **draw)  # fmt: skip


def top_k_sampling_from_probs(
    probs: Any,
    top_k: Any,
    indices: Any = None,
    deterministic: bool = True,
    generator: Any = None,
    check_nan: bool = False,
    seed: Any = None,
    offset: Any = None,
    return_valid: bool = False,
    *,
    pool: ThreadPool | Queue | None = None,
) -> Any:
    """A token among the top_k likeliest of each row, top_k >= 1: int32 [batch]."""
    draw = _draw(indices, generator, seed, offset, check_nan)
    return sample("top_k_sampling_from_probs", "probs", probs, top_k=top_k,
                  return_valid=return_valid, pool=pool, **draw)  # fmt: skip


def top_p_sampling_from_probs(
    probs: Any,
    top_p: Any,
    indices: Any = None,
    deterministic: bool = True,
    generator: Any = None,
    check_nan: bool = False,
    seed: Any = None,
    offset: Any = None,
    return_valid: bool = False,
    *,
    pool: ThreadPool | Queue | None = None,
) -> Any:
    """A token of the nucleus of mass top_p of each row, top_p in (0, 1]: int32 [batch]."""
    draw = _draw(indices, generator, seed, offset, check_nan)
    return sample("top_p_sampling_from_probs", "probs", probs, top_p=top_p,
                  return_valid=return_valid, pool=pool, **draw)  # fmt: skip


def min_p_sampling_from_probs(
    probs: Any,
    min_p: Any,
    indices: Any = None,
    deterministic: bool = True,
    generator: Any = None,
    check_nan: bool = False,
    seed: Any = None,
    offset: Any = None,
    return_valid: bool = False,
    *,
    pool: ThreadPool | Queue | None = None,
) -> Any:
    """A token at least min_p times as likely as the likeliest, min_p in [0, 1]: int32 [batch]."""
    draw = _draw(indices, generator, seed, offset, check_nan)
    return sample("min_p_sampling_from_probs", "probs", probs, min_p=min_p,
                  return_valid=return_valid, pool=pool, **draw)  # fmt: skip


def top_k_top_p_sampling_from_logits(
    logits: Any,
    top_k: Any,
    top_p: Any,
    indices: Any = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: Any = None,
    check_nan: bool = False,
    seed: Any = None,
    offset: Any = None,
    *,
    pool: ThreadPool | Queue | None = None,
) -> Any:
    """A token of softmax(logits) after both filters: int32 [batch].

    `filter_apply_order`: "top_k_first": top_p is of what top-k left; "joint": of the whole row.
    """
    op = "top_k_top_p_sampling_from_logits"
    draw = _draw(indices, generator, seed, offset, check_nan)
    return sample(op, "logits", logits, top_k=top_k, top_p=top_p,
                  joint=_is_joint(op, filter_apply_order), pool=pool, **draw)  # fmt: skip


def top_k_top_p_sampling_from_probs(
    probs: Any,
    top_k: Any,
    top_p: Any,
    indices: Any = None,
    filter_apply_order: str = "top_k_first",
    deterministic: bool = True,
    generator: Any = None,
    check_nan: bool = False,
    seed: Any = None,
    offset: Any = None,
    return_valid: bool = False,
    *,
    pool: ThreadPool | Queue | None = None,
) -> Any:
    """Samples as `top_k_top_p_sampling_from_logits` does, from probs."""
    op = "top_k_top_p_sampling_from_probs"
    draw = _draw(indices, generator, seed, offset, check_nan)
    return sample(op, "probs", probs, top_k=top_k, top_p=top_p, return_valid=return_valid,
                  joint=_is_joint(op, filter_apply_order), pool=pool, **draw)  # fmt: skip

"""The filters of `sampling` without the draw, speculative sampling, and token masks."""

from typing import Any

import numpy as np

from effinfer import _core
from effinfer._core import InvalidArgumentError, ThreadPool
from effinfer.ops.shared import arrays
from effinfer.ops.shared.row_arguments import filter_rows, seeds_of


def top_k_renorm_probs(
    probs: Any, top_k: Any, is_deterministic: bool = False, *, pool: ThreadPool | None = None
) -> Any:
    """probs [batch, vocab] with all but the top_k likeliest of each row 0, summing to 1."""
    return filter_rows("top_k_renorm_probs", "probs", probs, "probs", top_k=top_k, pool=pool)


def top_p_renorm_probs(
    probs: Any, top_p: Any, is_deterministic: bool = False, *, pool: ThreadPool | None = None
) -> Any:
    """probs [batch, vocab] with all but the nucleus of mass top_p 0, summing to 1."""
    return filter_rows("top_p_renorm_probs", "probs", probs, "probs", top_p=top_p, pool=pool)


def top_k_mask_logits(logits: Any, top_k: Any, *, pool: ThreadPool | None = None) -> Any:
    """logits [batch, vocab] with all but the top_k highest of each row negative infinity."""
    return filter_rows("top_k_mask_logits", "logits", logits, "logits", top_k=top_k, pool=pool)


def chain_speculative_sampling(
    draft_probs: Any,
    draft_token_ids: Any,
    target_probs: Any,
    maybe_output_accepted_token_num: Any = None,
    maybe_output_emitted_draft_token_num: Any = None,
    deterministic: bool = True,
    generator: Any = None,
    seed: Any = None,
    offset: Any = None,
    *,
    pool: ThreadPool | None = None,
) -> tuple[Any, Any, Any]:
    """Accepts or rejects a chain of n drafts (arXiv:2211.17192): tokens follow the target exactly.

    Args:
        draft_probs: float32 [batch, n, vocab], what the drafts were drawn from.
        draft_token_ids: int32 [batch, n].
        target_probs: float32 [batch, n + 1, vocab].
        maybe_output_accepted_token_num: int32 [batch]: the counts are added to it, in place.
        maybe_output_emitted_draft_token_num: the same.

    Returns:
        (tokens int32 [batch, n + 1]: the drafts up to the first rejection, one token more, then -1;
        accepted [batch]: the drafts that would be accepted, each by itself;
        emitted [batch]: the drafts in tokens).
    """
    op = "chain_speculative_sampling"
    counts = (
        ("maybe_output_accepted_token_num", maybe_output_accepted_token_num),
        ("maybe_output_emitted_draft_token_num", maybe_output_emitted_draft_token_num),
    )
    sums = [None if x is None else arrays.writable(x, f"[{op}] {name}") for name, x in counts]
    ids = arrays.dense(draft_token_ids, f"[{op}] draft_token_ids")
    for (name, _), array in zip(counts, sums, strict=True):
        if array is not None and (array.dtype != np.int32 or array.shape != ids.shape[:1]):
            raise InvalidArgumentError(
                f"[{op}] {name}: expected int32 {ids.shape[:1]}, got {array.dtype} {array.shape}"
            )
    tokens, *added = _core.chain_speculative_sampling(
        arrays.dense(draft_probs, f"[{op}] draft_probs"),
        ids.astype(np.int32) if ids.dtype == np.int64 else ids,
        arrays.dense(target_probs, f"[{op}] target_probs"),
        *seeds_of(op, draft_probs, generator, seed, offset),
        pool=pool,
    )
    results = []
    for (_, given), array, more in zip(counts, sums, added, strict=True):
        if array is None:
            results.append(arrays.as_kind(more, draft_probs))
        else:
            array += more
            results.append(given)
    return arrays.as_kind(tokens, draft_probs), results[0], results[1]


def apply_token_bitmask(
    logits: Any, bitmask: Any, indices: Any = None, *, pool: ThreadPool | None = None
) -> None:
    """Sets logits of forbidden tokens to negative infinity, in place.

    Args:
        logits: float32, float16 or bfloat16 [batch, vocab] or [vocab].
        bitmask: int32 [batch, ceil(vocab / 32)]: bit i % 32 of word i / 32 is set where token i is
            allowed, as xgrammar and llguidance fill it. Each row allows a token at least.
        indices: the rows, of both, that are masked; default all.
    """
    op = "apply_token_bitmask"
    rows = arrays.writable(logits, f"[{op}] logits")
    mask = arrays.dense(bitmask, f"[{op}] bitmask")
    if rows.ndim == 1:
        rows, mask = rows[None], mask.reshape(1, -1)
    places = None if indices is None else np.asarray(indices, np.int64)
    _core.apply_token_bitmask(rows, mask, places, pool=pool)

"""The filters of `sampling` without the draw, speculative sampling, and token masks."""

from typing import Any

import numpy as np

from effinfer import _core
from effinfer._core import InvalidArgumentError, Queue, ThreadPool
from effinfer.ops.shared.arrays import dtype_name
from effinfer.ops.shared.places import place_of
from effinfer.ops.shared.row_arguments import filter_rows, seeds_of


def top_k_renorm_probs(
    probs: Any,
    top_k: Any,
    is_deterministic: bool = False,
    *,
    pool: ThreadPool | Queue | None = None,
) -> Any:
    """probs [batch, vocab] with all but the top_k likeliest of each row 0, summing to 1."""
    return filter_rows("top_k_renorm_probs", "probs", probs, "probs", top_k=top_k, pool=pool)


def top_p_renorm_probs(
    probs: Any,
    top_p: Any,
    is_deterministic: bool = False,
    *,
    pool: ThreadPool | Queue | None = None,
) -> Any:
    """probs [batch, vocab] with all but the nucleus of mass top_p 0, summing to 1."""
    return filter_rows("top_p_renorm_probs", "probs", probs, "probs", top_p=top_p, pool=pool)


def top_k_mask_logits(logits: Any, top_k: Any, *, pool: ThreadPool | Queue | None = None) -> Any:
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
    pool: ThreadPool | Queue | None = None,
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
    at = place_of(draft_probs, pool, f"[{op}] draft_probs")
    counts = (
        ("maybe_output_accepted_token_num", maybe_output_accepted_token_num),
        ("maybe_output_emitted_draft_token_num", maybe_output_emitted_draft_token_num),
    )
    sums = [None if x is None else at.writable(x, f"[{op}] {name}") for name, x in counts]
    ids = at.dense(draft_token_ids, f"[{op}] draft_token_ids")
    for (name, _), array in zip(counts, sums, strict=True):
        if array is not None and (array.dtype != np.int32 or array.shape != ids.shape[:1]):
            raise InvalidArgumentError(
                f"[{op}] {name}: expected int32 {ids.shape[:1]}, "
                f"got {dtype_name(array.dtype)} {array.shape}"
            )
    if not at.on_gpu and ids.dtype == np.int64:
        ids = ids.astype(np.int32)
    targets = at.dense(target_probs, f"[{op}] target_probs")
    tokens, memory = at.empty(draft_probs, targets.shape[:2], np.int32)
    # On the CPU, where rows may be refused, nothing is added before all have been drawn.
    fresh = [
        (given, array)
        if array is not None and at.on_gpu
        else at.zeros(draft_probs, ids.shape[:1], np.int32)
        for (_, given), array in zip(counts, sums, strict=True)
    ]
    accepted, emitted = (array for _, array in fresh)
    _core.chain_speculative_sampling(
        at.dense(draft_probs, f"[{op}] draft_probs"),
        ids,
        targets,
        *seeds_of(op, draft_probs, generator, seed, offset, at),
        memory,
        accepted,
        emitted,
        at.executor,
    )
    results = []
    for (_, given), array, (made, more) in zip(counts, sums, fresh, strict=True):
        if array is not None and not at.on_gpu:
            array += more
        results.append(made if array is None else given)
    return tokens, results[0], results[1]


def apply_token_bitmask(
    logits: Any, bitmask: Any, indices: Any = None, *, pool: ThreadPool | Queue | None = None
) -> None:
    """Sets logits of forbidden tokens to negative infinity, in place.

    Args:
        logits: float32, float16 or bfloat16 [batch, vocab] or [vocab].
        bitmask: int32 [batch, ceil(vocab / 32)]: bit i % 32 of word i / 32 is set where token i is
            allowed, as xgrammar and llguidance fill it. Each row allows a token at least.
        indices: the rows, of both, that are masked; default all.
    """
    op = "apply_token_bitmask"
    at = place_of(logits, pool, f"[{op}] logits")
    rows = at.writable(logits, f"[{op}] logits")
    mask = at.dense(bitmask, f"[{op}] bitmask")
    if rows.ndim == 1:
        rows, mask = rows[None], mask[None] if mask.ndim == 1 else mask
    places = at.optional(indices, f"[{op}] indices") if at.on_gpu else indices
    if places is not None and not at.on_gpu:
        places = np.asarray(places, np.int64)
    _core.apply_token_bitmask(rows, mask, places, pool=at.executor)

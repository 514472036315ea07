"""Attention over parts of the keys, and its merging, named as in FlashInfer.

A state is what attention over some keys gives: its output v and s, the log-sum-exp of its scores
(`return_lse=True`), in base 2 or, with `lse_base="ln"`, e. States of disjoint sets of keys merge to
the state of their union (arXiv:2501.01005, section 3.1). A state with s = -infinity saw no key and
counts for nothing, whatever its v holds.
"""

from typing import Any

import numpy as np

from effinfer import _core
from effinfer._core import ThreadPool
from effinfer.ops.arrays import dense, empty, writable
from effinfer.ops.options import expect


def merge_state(
    v_a: Any,
    s_a: Any,
    v_b: Any,
    s_b: Any,
    *,
    lse_base: str = "log2",
    pool: ThreadPool | None = None,
) -> tuple[Any, Any]:
    """The merged state (v [T, H, D] of v_a's dtype, s float32 [T, H]) of two.

    Args:
        v_a, v_b: [T, H, D], float32, float16 or bfloat16.
        s_a, s_b: float32 [T, H].
    """
    op = "[merge_state]"
    first = dense(v_a, f"{op} v_a")
    expect(first.ndim == 3, f"{op} v_a", "3 dimensions", f"shape {first.shape}")
    v, v_view = empty(v_a, first.shape)
    s, s_view = empty(v_a, first.shape[:2], np.float32)
    sums = dense(s_a, f"{op} s_a")
    other, other_sums = dense(v_b, f"{op} v_b"), dense(s_b, f"{op} s_b")
    _core.merge_state(first, sums, other, other_sums, v_view, s_view, lse_base=lse_base, pool=pool)
    return v, s


def merge_state_in_place(
    v: Any,
    s: Any,
    v_other: Any,
    s_other: Any,
    mask: Any = None,
    *,
    lse_base: str = "log2",
    pool: ThreadPool | None = None,
) -> None:
    """`merge_state` of (v, s) and the other state, written to v and s.

    Args:
        mask: bool [T]; tokens where it is False keep their state.
    """
    op = "[merge_state_in_place]"
    target, sums = writable(v, f"{op} v"), writable(s, f"{op} s")
    other, other_sums = dense(v_other, f"{op} v_other"), dense(s_other, f"{op} s_other")
    rows = None if mask is None else dense(mask, f"{op} mask")
    _core.merge_state(
        target, sums, other, other_sums, target, sums, mask=rows, lse_base=lse_base, pool=pool
    )


def merge_states(
    v: Any, s: Any, *, lse_base: str = "log2", pool: ThreadPool | None = None
) -> tuple[Any, Any]:
    """The merged state (v [T, H, D], s float32 [T, H]) of v [T, S, H, D] and s [T, S, H]."""
    vectors = dense(v, "[merge_states] v")
    expect(vectors.ndim == 4, "[merge_states] v", "4 dimensions", f"shape {vectors.shape}")
    tokens, _, heads, head_dim = vectors.shape
    merged, merged_view = empty(v, (tokens, heads, head_dim))
    sums, sums_view = empty(v, (tokens, heads), np.float32)
    given = dense(s, "[merge_states] s")
    _core.merge_states(vectors, given, merged_view, sums_view, lse_base=lse_base, pool=pool)
    return merged, sums

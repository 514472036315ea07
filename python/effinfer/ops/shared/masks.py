"""What the rows of a plan see: the caller's mask, or items that are scored after one prefix."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from effinfer.ops.shared.flashinfer import integers
from effinfer.ops.shared.options import Indices, expect, pack_mask
from effinfer.ops.shared.sequences import Sequences

Places = npt.NDArray[np.int64]

# Rows of a list at most: what causality hides from all of them is not visited.
_LIST_ROWS = 64


def mask_options(
    op: str, custom_mask: Any, packed: Any, causal: bool, qo_indptr: Any, kv_len: Any
) -> dict[str, Any]:
    """The plan's options for a mask, which replaces `causal`, or for none."""
    mask = pack_mask(op, custom_mask, packed, qo_indptr, kv_len)
    if mask is None:
        return {"causal": causal}
    return {"mask": mask[0], "mask_indptr": mask[1]}


@dataclass(frozen=True)
class Items:
    """Multi-item scoring: a sequence is a prefix and items, each behind a delimiter.

    A token of the prefix sees the keys up to its own place. A token behind it whose place in its
    item is t sees the prefix and the last t keys up to its own: itself and what precedes it in the
    item. A delimiter has t = 0 and sees the prefix alone.

        prefix_len_ptr          [B]: tokens of the prefixes
        token_pos_in_items_ptr  t of the tokens from the prefix on, of sequence b from
                                b * token_pos_in_items_len on
        max_item_len_ptr        [B]: no t is larger

    All are integers of any width. Cost is that of what is seen.
    """

    prefix_len_ptr: Any = None
    token_pos_in_items_ptr: Any = None
    token_pos_in_items_len: int = 0
    max_item_len_ptr: Any = None

    def options(self, op: str, sequences: Sequences, num_kv_heads: int) -> dict[str, Any] | None:
        """The options of a plan whose rows visit what they see alone; None without items."""
        if self.prefix_len_ptr is None:
            for name in ("token_pos_in_items_ptr", "max_item_len_ptr"):
                given = getattr(self, name)
                got = type(given).__name__
                expect(given is None, f"[{op}] {name}", "None without prefix_len_ptr", got)
            return None
        count = sequences.kv_len.size
        prefixes = self._lengths(op, "prefix_len_ptr", count)
        expect(bool((prefixes >= 0).all()), f"[{op}] prefix_len_ptr", "no negative length", "one")
        ok = self.token_pos_in_items_ptr is not None
        argument = f"[{op}] token_pos_in_items_ptr"
        expect(ok, argument, "an array with prefix_len_ptr", None)
        places = integers(self.token_pos_in_items_ptr, argument)
        limits = None
        if self.max_item_len_ptr is not None:
            limits = self._lengths(op, "max_item_len_ptr", count)
        parts = []
        for s in range(count):
            tokens, prefix = int(sequences.kv_len[s]), int(prefixes[s])
            own = self._places(op, places, s, tokens - prefix)
            if limits is not None and own.size:
                longest, argument = int(own.max()), f"[{op}] max_item_len_ptr[{s}]"
                expect(limits[s] >= longest, argument, f"{longest} or more", limits[s])
            first, end = sequences.qo_indptr[s : s + 2]
            parts.append(_blocks(s, int(first), int(end - first), tokens, prefix, own))
        return _joined(parts, num_kv_heads)

    def _lengths(self, op: str, name: str, count: int) -> Places:
        lengths = integers(getattr(self, name), f"[{op}] {name}")
        expect(lengths.size == count, f"[{op}] {name}", f"{count} values", lengths.size)
        return lengths

    def _places(self, op: str, places: Places, sequence: int, count: int) -> Places:
        """t of the tokens of a sequence from its prefix on."""
        pad, argument = self.token_pos_in_items_len, f"[{op}] token_pos_in_items_ptr"
        expected = "0 or the tokens behind the longest prefix"
        expect(pad == 0 or pad >= count, f"[{op}] token_pos_in_items_len", expected, pad)
        start = sequence * pad
        own = places[start : start + max(count, 0)]
        expected = f"{start + count} values or more for sequence {sequence}"
        expect(own.size >= count, argument, expected, places.size)
        expect(bool((own >= 0).all()), argument, "no negative place", "one")
        return own


def _blocks(
    sequence: int, first: int, rows: int, tokens: int, prefix: int, places: Places
) -> tuple[Indices, Indices]:
    """Blocks of rows that see the same keys but for causality: (sequence, first row, rows) [n, 3],
    and two spans of keys each [n, 2, 2], which may be empty."""
    own = np.arange(rows) + tokens - rows
    nearest = np.zeros(rows, np.int64)  # the first key behind the prefix that is seen
    behind = own >= prefix
    nearest[behind] = np.maximum(own[behind] + 1 - places[own[behind] - prefix], prefix)
    changes = np.ones(rows, bool)
    changes[1:] = nearest[1:] != nearest[:-1]
    runs = np.flatnonzero(changes)
    within = np.arange(rows) - np.repeat(runs, np.diff(np.append(runs, rows)))
    starts = np.flatnonzero(within % _LIST_ROWS == 0)
    sizes = np.diff(np.append(starts, rows))
    blocks = np.stack([np.full(starts.size, sequence), first + starts, sizes], axis=1)
    # Tokens before the first row's sequence, where there are fewer than rows, are none.
    last = np.maximum(own[starts + sizes - 1] + 1, 0)
    nearest = nearest[starts]
    whole = nearest <= prefix
    spans = np.zeros((starts.size, 2, 2), np.int64)
    spans[:, 0, 1] = np.where(whole, last, np.minimum(prefix, last))
    spans[:, 1, 0] = nearest
    spans[:, 1, 1] = np.where(whole, nearest, np.maximum(last, nearest))
    return blocks.astype(np.int32), spans.astype(np.int32)


def _joined(parts: list[tuple[Indices, Indices]], num_kv_heads: int) -> dict[str, Any]:
    """The lists of all blocks and KV heads, as `_core.AttentionPlan` takes them."""
    blocks = np.concatenate([np.zeros((0, 3), np.int32), *(part[0] for part in parts)])
    spans = np.concatenate([np.zeros((0, 2, 2), np.int32), *(part[1] for part in parts)])
    heads = np.repeat(np.arange(num_kv_heads, dtype=np.int32), len(blocks))
    lists = np.insert(np.tile(blocks, (num_kv_heads, 1)), 1, heads, axis=1)
    spans = np.tile(spans, (num_kv_heads, 1, 1))
    kept = spans[..., 1] > spans[..., 0]
    starts = np.concatenate([[0], np.cumsum(kept.sum(axis=1))]).astype(np.int32)
    return {"causal": True, "lists": lists, "blocks": (starts, spans[kept])}


def plan_masks(
    op: str,
    sequences: Sequences,
    num_kv_heads: int,
    custom_mask: Any,
    packed: Any,
    causal: bool,
    items: Items,
) -> dict[str, Any]:
    """The plan's options for a mask, for items, or for neither."""
    scored = items.options(op, sequences, num_kv_heads)
    if scored is None:
        lists: tuple[Indices, Indices] = (sequences.qo_indptr, sequences.kv_len)
        return mask_options(op, custom_mask, packed, causal, *lists)
    for name, given in (("custom_mask", custom_mask), ("packed_custom_mask", packed)):
        got = type(given).__name__
        expect(given is None, f"[{op}] {name}", "None with prefix_len_ptr", got)
    return scored

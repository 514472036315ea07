"""Masks of a plan: the caller's, and those of items that are scored after one prefix."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from effinfer.ops.shared.arrays import Array
from effinfer.ops.shared.flashinfer import integers
from effinfer.ops.shared.options import Indices, expect, pack_mask
from effinfer.ops.shared.sequences import Sequences

# Elements of a mask that are in memory before they are bits.
_CHUNK = 1 << 22


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

    All are integers of any width.
    """

    prefix_len_ptr: Any = None
    token_pos_in_items_ptr: Any = None
    token_pos_in_items_len: int = 0
    max_item_len_ptr: Any = None

    def mask(self, op: str, sequences: Sequences) -> tuple[Array, npt.NDArray[np.int64]] | None:
        """The bits of the mask and where each sequence's bytes are; None without items."""
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
        rows = np.diff(sequences.qo_indptr).astype(np.int64)
        starts = np.concatenate([[0], np.cumsum(-(-rows * sequences.kv_len // 8))])
        bits = np.zeros(starts[-1], np.uint8)
        for s in range(count):
            tokens = int(sequences.kv_len[s])
            own = self._places(op, places, s, tokens - int(prefixes[s]))
            if limits is not None and own.size:
                longest, argument = int(own.max()), f"[{op}] max_item_len_ptr[{s}]"
                expect(limits[s] >= longest, argument, f"{longest} or more", limits[s])
            _fill(bits[starts[s] : starts[s + 1]], int(rows[s]), tokens, int(prefixes[s]), own)
        return bits, starts

    def _lengths(self, op: str, name: str, count: int) -> npt.NDArray[np.int64]:
        lengths = integers(getattr(self, name), f"[{op}] {name}")
        expect(lengths.size == count, f"[{op}] {name}", f"{count} values", lengths.size)
        return lengths

    def _places(
        self, op: str, places: npt.NDArray[np.int64], sequence: int, count: int
    ) -> npt.NDArray[np.int64]:
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


def _fill(bits: Array, rows: int, tokens: int, prefix: int, places: Array) -> None:
    """Sets the bits (row, key) of what the last `rows` of `tokens` see."""
    keys = np.arange(tokens)
    # Rows of whole bytes, so that chunks of them begin with a byte.
    step = max(_CHUNK // max(tokens, 1) // 8 * 8, 8)
    for first in range(0, rows, step):
        own = np.arange(first, min(first + step, rows)) + tokens - rows
        nearest = np.zeros(own.size, np.int64)  # the first key behind the prefix that is seen
        behind = own >= prefix
        nearest[behind] = own[behind] + 1 - places[own[behind] - prefix]
        seen = (keys < prefix) | (keys >= nearest[:, None])
        seen &= keys <= own[:, None]
        packed = np.packbits(seen.reshape(-1), bitorder="little")
        begin = first * tokens // 8
        bits[begin : begin + packed.size] = packed


def plan_masks(
    op: str, sequences: Sequences, custom_mask: Any, packed: Any, causal: bool, items: Items
) -> dict[str, Any]:
    """The plan's options for a mask, for items, or for neither."""
    scored = items.mask(op, sequences)
    if scored is None:
        lists: tuple[Indices, Indices] = (sequences.qo_indptr, sequences.kv_len)
        return mask_options(op, custom_mask, packed, causal, *lists)
    for name, given in (("custom_mask", custom_mask), ("packed_custom_mask", packed)):
        got = type(given).__name__
        expect(given is None, f"[{op}] {name}", "None with prefix_len_ptr", got)
    return {"mask": scored[0], "mask_indptr": scored[1]}

"""What the arguments of the attention operators mean: index vectors, caches, masks, positions."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from effinfer import _core
from effinfer._core import InvalidArgumentError, PagedKv, UnsupportedError
from effinfer.ops.shared.arrays import Array, dtype_name
from effinfer.ops.shared.places import HOST, AnyView, Place, to_host

Indices = npt.NDArray[np.int32]

LAYOUTS = ("NHD", "HND")
POSITIONS = ("NONE", "ROPE_LLAMA", "ALIBI")


@contextmanager
def errors_of(op: str) -> Iterator[None]:
    """Errors of the operators inside are those of `op`; also a decorator."""
    try:
        yield
    except (InvalidArgumentError, UnsupportedError) as error:
        name, found, problem = str(error).partition("] ")
        if not found or not name.startswith("["):
            raise
        raise type(error)(f"[{op}] {problem}") from None


def expect(ok: bool, argument: str, expected: str, got: object) -> None:
    if not ok:
        raise InvalidArgumentError(f"{argument}: expected {expected}, got {got}")


def one_of(value: str, choices: tuple[str, ...], argument: str) -> str:
    expect(value in choices, argument, " or ".join(choices), value)
    return value


# Why arguments that belong to FlashInfer's kernels have no meaning here.
_REASONS = {
    "bmm1_scale": "scores take sm_scale, ckv_scale and kpe_scale",
    "bmm2_scale": "results take ckv_scale",
    "block_mask": "blocks are indptr and indices",
    "block_tables": "pages are kv_indptr, kv_indices and kv_len_arr",
    "ckv_scale_arr": "a scale holds for all dimensions of a token",
    "cum_seq_lens_q": "rows are qo_indptr",
    "custom_fusion_rules": "one call joins all that follow one another",
    "custom_validity_checks": "a pipe checks what its processors take",
    "jit_args": "kernels are compiled with the library",
    "jit_kwargs": "kernels are compiled with the library",
    "k_scale": "run() takes scale_k",
    "kv_cache_sf": "caches have no 4-bit floats",
    "kv_block_lens": "blocks are indptr and indices",
    "kv_len": "plan() takes the lists",
    "max_q_len": "rows are qo_indptr",
    "metadata": "plan() takes the lists",
    "o_scale": "results have the type of the queries",
    "page_table": "plan() takes the lists",
    "profiler_buffer": "kernels write no profiles",
    "kv_splits": "attention folds its keys at fixed places",
    "q2k_indices": "blocks are indptr and indices",
    "q2k_num": "blocks are indptr and indices",
    "q_scale": "run() takes scale_q",
    "scale_q": "queries are float32, float16 or bfloat16",
    "seq_lens": "lengths are kv_len_arr",
    "skip_softmax": "attention is exact; lists of blocks make it sparse",
    "skip_softmax_threshold_scale_factor": "attention is exact; lists of blocks make it sparse",
    "use_clc": "no clusters on a CPU",
    "use_fp16_softmax": "sums are float32",
    "uses_spcompress": "attention is exact; lists of blocks make it sparse",
    "v_scale": "run() takes scale_v",
    "variant_owns_mask": "kernels are compiled with the library",
    "window_right": "a row sees no key after its own place; a mask shows others",
}


def unsupported(op: str, **given: Any) -> None:
    """Refuses arguments that are not None, False or 0: `UnsupportedError` with the reason."""
    for name, value in given.items():
        if name not in _REASONS:
            raise TypeError(f"[{op}] {name}: no such argument")
        if value is None or (isinstance(value, (bool, int)) and not value):
            continue
        got = value if isinstance(value, (bool, int, float, str)) else type(value).__name__
        raise UnsupportedError(f"[{op}] {name}: expected None ({_REASONS[name]}), got {got}")


def number_or_array(x: Any, argument: str, at: Place = HOST) -> Any:
    """A scale: one number, 1 for None, or an array with one for each token and head."""
    if x is None or isinstance(x, (int, float)):
        return 1.0 if x is None else float(x)
    scales = at.view(x, argument)
    if isinstance(scales, _core.DeviceArray):
        return scales
    if scales.ndim > 1 or scales.size != 1:
        return scales
    name = dtype_name(scales.dtype)
    expect(name in ("float16", "float32", "float64"), argument, "a number", name)
    return float(scales.reshape(-1)[0])


def indices(x: Any, argument: str) -> Indices:
    """A vector of indices as int32, copied from a GPU; int64 is narrowed."""
    array = to_host(x, argument)
    expect(array.dtype in (np.int32, np.int64), argument, "int32 or int64", array.dtype)
    expect(array.ndim == 1, argument, "1 dimension", f"shape {array.shape}")
    if array.dtype == np.int64:
        limits = np.iinfo(np.int32)
        fits = not array.size or (array.min() >= limits.min and array.max() <= limits.max)
        expect(fits, argument, "values that fit int32", "larger ones")
    return array.astype(np.int32, copy=False)


def indptr(x: Any, argument: str, size: int | None = None) -> Indices:
    """Offsets [size]: 0 first, never decreasing."""
    offsets = indices(x, argument)
    expect(offsets.size > 0, argument, "at least one value", "none")
    expect(size in (None, offsets.size), argument, f"{size} values", offsets.size)
    expect(offsets[0] == 0, argument, "0 first", offsets[0])
    expect(bool((offsets[1:] >= offsets[:-1]).all()), argument, "values that never decrease", "one")
    return offsets


def page_lengths(op: str, pages: Indices, last_page_len: Any, name: str, page_size: int) -> Indices:
    """Tokens of each sequence from its number of pages and the tokens in the last one."""
    argument = f"[{op}] {name}"
    expect(page_size > 0, f"[{op}] page_size", "a positive number", page_size)
    last = indices(last_page_len, argument)
    counts = np.diff(pages).astype(np.int64)
    expect(last.size == counts.size, argument, f"{counts.size} values", last.size)
    bad = (counts > 0) & ((last < 1) | (last > page_size))
    if bad.any():
        place = int(np.argmax(bad))
        expect(False, f"{argument}[{place}]", f"1 to page_size = {page_size}", last[place])
    lengths = np.where(counts > 0, (counts - 1) * page_size + last, 0)
    expect(int(lengths.max(initial=0)) < 2**31, argument, "fewer than 2^31 tokens", "more")
    return lengths.astype(np.int32)


def view_3d(x: Any, argument: str, at: Place = HOST) -> AnyView:
    """`view` of an array of three dimensions. Throws InvalidArgumentError for another."""
    array = at.view(x, argument)
    expect(array.ndim == 3, argument, "3 dimensions", f"shape {array.shape}")
    return array


def kv_views(op: str, cache: Any, layout: str, rank: int = 4, at: Place = HOST) -> tuple[Any, Any]:
    """Keys and values of a (k, v) tuple, of one array [pages, 2, ...], or the engine's pages."""
    argument = f"[{op}] paged_kv_cache"
    if isinstance(cache, PagedKv):
        return cache, cache
    if isinstance(cache, (tuple, list)):
        expect(len(cache) == 2, argument, "(k_cache, v_cache)", f"{len(cache)} arrays")
        pair = at.view(cache[0], f"{argument}[0]"), at.view(cache[1], f"{argument}[1]")
    else:
        both = at.view(cache, argument)
        ok = both.ndim == rank + 1 and both.shape[1] == 2
        expect(ok, argument, f"(k, v) or shape [num_pages, 2, ...] for {layout}", both.shape)
        pair = both[:, 0], both[:, 1]
    for part in pair:
        expect(part.ndim == rank, argument, f"{rank} dimensions for {layout}", part.shape)
    return pair


def data_type_name(data_type: Any) -> str | None:
    """ "float16" of "float16", torch.float16, np.float16 or np.dtype(np.float16)."""
    if data_type is None:
        return None
    if isinstance(data_type, np.dtype):
        return dtype_name(data_type)
    return str(getattr(data_type, "__name__", data_type)).removeprefix("torch.")


def pack_mask(
    op: str, custom_mask: Any, packed: Any, qo_indptr: Indices, kv_len: Indices
) -> tuple[Array, npt.NDArray[np.int64]] | None:
    """Bits of a mask, the lowest first, each sequence from a new byte; and where those bytes are.

    Args:
        custom_mask: bool, the rows of every sequence one after the other, kv_len values each.
        packed: the result itself, which then wins.
    """
    if custom_mask is None and packed is None:
        return None
    sizes = np.diff(qo_indptr).astype(np.int64) * kv_len
    starts = np.concatenate([[0], np.cumsum(-(-sizes // 8))])
    if packed is not None:
        bits = to_host(packed, f"[{op}] packed_custom_mask")
        ok = bits.dtype == np.uint8 and bits.shape == (starts[-1],)
        expect(ok, f"[{op}] packed_custom_mask", f"uint8 ({starts[-1]},)", _shape(bits))
        return bits, starts
    mask = to_host(custom_mask, f"[{op}] custom_mask").reshape(-1)
    ok = mask.dtype in (np.bool_, np.uint8) and mask.size == sizes.sum()
    expect(ok, f"[{op}] custom_mask", f"bool of {sizes.sum()} values", _shape(mask))
    bits = np.empty(int(starts[-1]), np.uint8)
    _core.packbits(mask, np.concatenate([[0], np.cumsum(sizes)]), starts, "little", bits)
    return bits, starts


def _shape(array: Array) -> str:
    return f"{array.dtype} {array.shape}"


def alibi_slopes(num_heads: int) -> npt.NDArray[np.float32]:
    """Slopes of linear biases (arXiv:2108.12409, section 3): 2^(-8 i / n) for n heads, n a power of
    two; other counts add every second slope of 2 n heads."""
    power = 1 << (num_heads.bit_length() - 1)
    slopes = 2.0 ** (-8.0 / power * np.arange(1, power + 1))
    more = 2.0 ** (-4.0 / power * np.arange(1, 2 * (num_heads - power) + 1, 2))
    return np.concatenate([slopes, more]).astype(np.float32)


def contiguous_rows(array: AnyView) -> AnyView:
    """The array, or a copy when its last dimension has a stride; a GPU's is left to the operator,
    which refuses it."""
    if array.shape[-1] < 2 or array.strides[-1] == array.itemsize:
        return array
    if isinstance(array, _core.DeviceArray):
        return array
    return np.array(array, dtype=array.dtype, order="C")


@dataclass(frozen=True)
class Scores:
    """What happens to a score before the softmax, as plan() was told."""

    sm_scale: float | None = None
    logits_soft_cap: float | None = None
    pos_encoding_mode: str = "NONE"
    rope_scale: float | None = None
    rope_theta: float | None = None

    def check(self, op: str) -> "Scores":
        one_of(self.pos_encoding_mode, POSITIONS, f"[{op}] pos_encoding_mode")
        for name in ("sm_scale", "logits_soft_cap", "rope_scale", "rope_theta"):
            value = getattr(self, name)
            ok = value is None or math.isfinite(value)
            expect(ok, f"[{op}] {name}", "a finite number", value)
        cap = self.logits_soft_cap or 0.0
        expect(cap >= 0, f"[{op}] logits_soft_cap", "a number >= 0 or None", cap)
        return self

    def scale(self, head_dim: int) -> float:
        return 1.0 / math.sqrt(head_dim) if self.sm_scale is None else float(self.sm_scale)

"""Random ragged batches over paged and ragged keys, and the values that their dtypes hold."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from effinfer import ops
from tests.ops.reference import Expected, attend, join, seen

TAGS = {
    "bfloat16": (torch.int16, ops.bfloat16),
    "float8_e4m3fn": (torch.uint8, ops.float8_e4m3fn),
    "float8_e5m2": (torch.uint8, ops.float8_e5m2),
}


def as_dtype(x: np.ndarray, dtype: str) -> np.ndarray:
    """x rounded: a numpy array, tagged where numpy has no such dtype; int8 as if 1 were 32."""
    if dtype == "int8":
        return np.clip(np.rint(x * 32), -127, 127).astype(np.int8)
    rounded = torch.from_numpy(np.ascontiguousarray(x, np.float32)).to(getattr(torch, dtype))
    if dtype not in TAGS:
        return rounded.numpy()
    integer, tag = TAGS[dtype]
    return rounded.view(integer).numpy().view(tag)


def values_of(x: np.ndarray, dtype: str) -> np.ndarray:
    """What an array of `as_dtype` holds, in float64."""
    if dtype in TAGS:
        bits = torch.from_numpy(x.view({1: np.uint8, 2: np.int16}[x.itemsize]))
        return bits.view(getattr(torch, dtype)).double().numpy()
    return x.astype(np.float64)


def as_torch(x: np.ndarray, dtype: str) -> torch.Tensor:
    if dtype in TAGS:
        bits = torch.from_numpy(x.view({1: np.uint8, 2: np.int16}[x.itemsize]))
        return bits.view(getattr(torch, dtype))
    return torch.from_numpy(x)


def offsets(lengths: list[int]) -> np.ndarray:
    return np.cumsum([0, *lengths]).astype(np.int32)


@dataclass
class Shape:
    num_qo_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    head_dim_vo: int | None = None

    @property
    def dim_vo(self) -> int:
        return self.head_dim if self.head_dim_vo is None else self.head_dim_vo


@dataclass
class Paged:
    """Sequences whose pages are scattered over a cache that holds NaNs elsewhere."""

    rng: np.random.Generator
    kv_lens: list[int]
    page_size: int
    shape: Shape = field(default_factory=Shape)
    kv_dtype: str = "float32"
    layout: str = "NHD"
    one_array: bool = False

    def __post_init__(self) -> None:
        counts = [-(-n // self.page_size) for n in self.kv_lens]
        self.num_pages = sum(counts) + 2
        self.kv_indptr = offsets(counts)
        self.kv_indices = self.rng.permutation(self.num_pages)[: sum(counts)].astype(np.int32)
        self.last_page_len = np.array(
            [
                n - (c - 1) * self.page_size if c else 1
                for n, c in zip(self.kv_lens, counts, strict=True)
            ],
            np.int32,
        )
        self.kv_len = np.array(self.kv_lens, np.int32)
        shape = (self.num_pages, self.page_size, self.shape.num_kv_heads)
        stale = 3.9 if self.kv_dtype == "int8" else np.nan
        dims = self.shape.head_dim, self.shape.dim_vo
        caches = [np.full((*shape, dim), stale, np.float32) for dim in dims]
        self._sequences = []
        for s, length in enumerate(self.kv_lens):
            at = self.places(s)
            for cache in caches:
                cache[at] = self.rng.standard_normal((length, *cache.shape[2:]), np.float32)
        stored = [as_dtype(cache, self.kv_dtype) for cache in caches]
        exact = [values_of(cache, self.kv_dtype) for cache in stored]
        self.keys, self.values = (
            [cache[self.places(s)] for s in range(len(self.kv_lens))] for cache in exact
        )
        if self.layout == "HND":
            stored = [np.ascontiguousarray(cache.swapaxes(1, 2)) for cache in stored]
        self.cache: Any = np.stack(stored, axis=1) if self.one_array else tuple(stored)
        if self.one_array:
            self.cache = self.cache.view(stored[0].dtype)

    def places(self, s: int) -> tuple[np.ndarray, np.ndarray]:
        """Page and slot of every token of a sequence."""
        token = np.arange(self.kv_lens[s])
        pages = self.kv_indices[self.kv_indptr[s] : self.kv_indptr[s + 1]]
        return pages[token // self.page_size], token % self.page_size

    @property
    def lists(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.kv_indptr, self.kv_indices, self.last_page_len

    def queries(self, rows: list[int], dtype: str = "float32") -> np.ndarray:
        shape = (sum(rows), self.shape.num_qo_heads, self.shape.head_dim)
        return as_dtype(self.rng.standard_normal(shape, np.float32), dtype)

    def expected(
        self,
        q: np.ndarray,
        rows: list[int],
        dtype: str = "float32",
        *,
        causal: bool = False,
        window_left: int = -1,
        masks: list[np.ndarray] | None = None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        **scores: Any,
    ) -> Expected:
        starts = offsets(rows)
        exact = values_of(q, dtype)
        parts = []
        for s, n in enumerate(rows):
            mask = seen(n, self.kv_lens[s], causal and masks is None, window_left)
            if masks is not None:
                mask = mask & masks[s]
            k, v = self.keys[s] * k_scale, self.values[s] * v_scale
            parts.append(attend(exact[starts[s] : starts[s + 1]], k, v, mask, **scores))
        return join(parts)

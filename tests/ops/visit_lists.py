"""Lists of the keys that rows visit: made at random, and as masks."""

import numpy as np

from effinfer import _core
from tests.ops.attention_reference import Batch

# heads, kv_heads, head_dim
SHAPES = [(3, 3, 16), (9, 3, 64), (4, 1, 80), (9, 1, 128), (2, 2, 256)]
# Of which generated rows' keys are chosen: 1 to 7 heads that share keys.
CHOOSING = [*SHAPES[:2], (5, 1, 32), (7, 1, 128)]


def row_visits(batch: Batch, heads: int, kv_heads: int, *, weighted: bool = False) -> _core.Visits:
    """With a list for each generated row."""
    return _core.Visits(
        batch.qo_indptr, batch.kv_len, heads, kv_heads, generated=True, weighted=weighted
    )


def unpack(words: np.ndarray, length: int) -> np.ndarray:
    """Bits of the last axis: bool [..., length]."""
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    return bits[..., :length].astype(bool)


def visited(visits: _core.Visits, batch: Batch, kv_heads: int) -> list[np.ndarray]:
    """bool [kv_heads, rows, kv_len] of each sequence."""
    masks = [
        np.ones((kv_heads, batch.rows(s).stop - batch.rows(s).start, length), bool)
        for s, length in enumerate(batch.kv_len)
    ]
    for (sequence, first, rows, _), words in zip(visits.blocks, visits.words, strict=True):
        begin = first - batch.qo_indptr[sequence]
        bits = unpack(words, batch.kv_len[sequence])
        masks[sequence][:, begin : begin + rows] = bits[:, None]
    return masks


def random_words(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Pages of every kind: none of their tokens, few, many, all."""
    density = rng.choice([0.0, 0.02, 0.3, 0.6, 1.0], shape)
    bits = rng.random((*shape, 64)) < density[..., None]
    return np.packbits(bits, axis=-1, bitorder="little").view(np.uint64)[..., 0]

"""Sparse prefill over pages: attention over lists of visits, and the methods that choose them,
against float64."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from effinfer import _core
from tests.ops.attention_reference import fill, make_batch, reference
from tests.ops.test_attention import bf16_arithmetic, to_bf16
from tests.ops.visit_lists import SHAPES, random_words, unpack, visited
from tests.tolerance import BF16_EPS, assert_close

KV_LENS = [64, 130, 700, 1, 1030, 333, 90]
QO_LENS = [64, 65, 200, 1, 130, 63, 90]
SPARSE_ROWS = 64


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "i8"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_attention_sees_what_lists_have(isa, dtype, heads, kv_heads, head_dim):
    rng = np.random.default_rng(head_dim)
    batch = make_batch(rng, KV_LENS, QO_LENS)
    kv, keys, values = fill(rng, batch, kv_heads, head_dim, dtype)
    q = rng.standard_normal((sum(QO_LENS), heads, head_dim), np.float32)
    visits = _core.Visits(batch.qo_indptr, batch.kv_len, heads, kv_heads)
    visits.words[:] = random_words(rng, visits.words.shape)
    lists = visited(visits, batch, kv_heads)
    scale = np.float32(head_dim**-0.5)
    out = _core.paged_attention(q, kv, *batch.lists, sm_scale=scale, visits=visits)
    expected, magnitude = reference(q, keys, values, batch, scale, visited=lists)
    assert_close(out, expected, terms=head_dim + max(KV_LENS), magnitude=magnitude)
    if dtype == "bf16" and bf16_arithmetic():
        out = _core.paged_attention(
            q, kv, *batch.lists, sm_scale=scale, arithmetic="bf16", visits=visits
        )
        expected, magnitude = reference(
            to_bf16(q * scale), keys, values, batch, 1.0, visited=lists, of_probabilities=True
        )
        assert_close(out, expected, magnitude=magnitude, eps=BF16_EPS / 2)


@pytest.mark.parametrize("window", [0, 63, 150, 700])
def test_of_lists_rows_see_what_their_windows_show(isa, window):
    rng = np.random.default_rng(window)
    batch = make_batch(rng, KV_LENS, QO_LENS)
    kv, keys, values = fill(rng, batch, 3, 64, "bf16")
    q = rng.standard_normal((sum(QO_LENS), 9, 64), np.float32)
    visits = _core.Visits(batch.qo_indptr, batch.kv_len, 9, 3)
    visits.words[:] = random_words(rng, visits.words.shape)
    lists = visited(visits, batch, 3)
    scale = np.float32(0.125)
    out = _core.paged_attention(
        q, kv, *batch.lists, sm_scale=scale, window_left=window, visits=visits
    )
    expected, magnitude = reference(q, keys, values, batch, scale, window, visited=lists)
    assert_close(out, expected, terms=64 + max(KV_LENS), magnitude=magnitude)


def test_lists_of_everything_are_dense_attention(isa):
    rng = np.random.default_rng(3)
    batch = make_batch(rng, KV_LENS, QO_LENS)
    kv, _, _ = fill(rng, batch, 3, 64, "bf16")
    q = rng.standard_normal((sum(QO_LENS), 9, 64), np.float32)
    visits = _core.Visits(batch.qo_indptr, batch.kv_len, 9, 3)
    visits.words[:] = ~np.uint64(0)
    dense = _core.paged_attention(q, kv, *batch.lists)
    np.testing.assert_array_equal(_core.paged_attention(q, kv, *batch.lists, visits=visits), dense)


def test_threads_do_not_change_bits(isa):
    rng = np.random.default_rng(4)
    batch = make_batch(rng, [9000], [100])  # long enough to be split
    kv, _, _ = fill(rng, batch, 2, 32, "bf16")
    q = rng.standard_normal((100, 4, 32), np.float32)
    visits = _core.Visits(batch.qo_indptr, batch.kv_len, 4, 2)
    visits.words[:] = random_words(rng, visits.words.shape)
    one, four = (
        _core.paged_attention(
            q, kv, *batch.lists, visits=visits, pool=_core.ThreadPool(n, oversubscribe=True)
        )
        for n in (1, 4)
    )
    np.testing.assert_array_equal(one, four)


# What a method may choose: the sets that surely belong, and that may, as scores are rounded.
Bounds = tuple[np.ndarray, np.ndarray]


def top(scores: np.ndarray, count: int, mass: float) -> Bounds:
    """Of float64 scores [n]."""
    order = np.sort(scores)[::-1]
    if mass > 0:
        share = np.cumsum(order) / order.sum()
        count = int(np.searchsorted(share, mass)) + 1
        # A sum that falls on the limit may need one more or one less.
        least, most = (int(np.searchsorted(share, mass + shift)) + 1 for shift in (-1e-4, 1e-4))
    else:
        least = most = count
    least, most = min(least, len(order)), min(most, len(order))
    slack = 1e-4 * order[0]
    sure = scores > (order[least] if least < len(order) else -np.inf) + slack
    if least == len(order):
        sure[:] = True
    maybe = scores >= order[most - 1] - slack if most > 0 else np.zeros(len(scores), bool)
    return sure & (least > 0), maybe


def always(length: int, block, sink_tokens: int, local_tokens: int) -> np.ndarray:
    _, _, rows, position = block
    bits = np.zeros(length, bool)
    bits[:sink_tokens] = True
    bits[max(0, position - max(local_tokens - 1, 0)) : position + rows] = True
    return bits


def check_lists(visits, batch, choose, sink_tokens: int, local_tokens: int) -> None:
    """choose(sequence, kv_head, block): Bounds of the block's tokens."""
    assert len(visits.blocks) > 0
    for block, words in zip(visits.blocks, visits.words, strict=True):
        length = int(batch.kv_len[block[0]])
        seen = np.arange(length) < block[2] + block[3]
        for kv_head, bits in enumerate(unpack(words, length)):
            sure, maybe = choose(int(block[0]), kv_head, block)
            fixed = always(length, block, sink_tokens, local_tokens)
            assert not ((sure | fixed) & seen & ~bits).any()
            assert not (bits & seen & ~(maybe | fixed)).any()


def probabilities(q: np.ndarray, k: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 [rows, len(k)], causal; of queries that have their scale."""
    scores = q.astype(np.float64) @ k.astype(np.float64).T
    scores[np.arange(len(k))[None, :] > positions[:, None]] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


Rounding = Callable[[np.ndarray], np.ndarray]


def arithmetics(dtype: str) -> list[tuple[str, Rounding]]:
    """What scores may be multiplied in at this level, and how queries with their scale are rounded
    for it."""
    exact: list[tuple[str, Rounding]] = [("f32", lambda x: x)]
    return [*exact, ("bf16", to_bf16)] if dtype == "bf16" and bf16_arithmetic() else exact


def column_bounds(q, keys, batch, options):
    """choose() of check_lists for column_visits."""
    stride = options.get("row_stride", 0)
    counts = [
        (options.get(a, 0), options.get(b, 0.0))
        for a, b in (("columns", "column_mass"), ("slashes", "slash_mass"))
    ]
    chosen: dict[tuple[int, int], tuple[Bounds, Bounds]] = {}

    def of_head(sequence: int, head: int, kv_head: int) -> tuple[Bounds, Bounds]:
        if (sequence, head) in chosen:
            return chosen[sequence, head]
        rows = np.arange(batch.rows(sequence).start, batch.rows(sequence).stop)
        length = int(batch.kv_len[sequence])
        asked = rows[::-1][::stride][::-1] if stride else rows[-options.get("last_rows", 64) :]
        positions = asked - rows[-1] + length - 1
        p = probabilities(q[asked, head], keys[sequence][:, kv_head], positions)
        distances = positions[:, None] - np.arange(length)[None, :]
        diagonals = np.bincount(
            distances[distances >= 0], weights=p[distances >= 0], minlength=length
        )
        chosen[sequence, head] = (top(p.sum(0), *counts[0]), top(diagonals, *counts[1]))
        return chosen[sequence, head]

    def choose(sequence: int, kv_head: int, block) -> Bounds:
        length = int(batch.kv_len[sequence])
        bounds = np.zeros((2, length), bool)
        group = q.shape[1] // keys[sequence].shape[1]
        for head in range(kv_head * group, (kv_head + 1) * group):
            columns, slashes = of_head(sequence, head, kv_head)
            for i in range(2):
                bounds[i] |= columns[i]
                for distance in np.flatnonzero(slashes[i]):
                    begin = block[3] - distance
                    bounds[i, max(begin, 0) : max(begin + block[2], 0)] = True
        return bounds[0], bounds[1]

    return choose


@pytest.mark.parametrize(
    "options",
    [
        {"columns": 20, "slashes": 5},
        {"columns": 0, "slashes": 9, "last_rows": 17},
        {"column_mass": 0.6, "row_stride": 20},
        {"column_mass": 0.5, "slash_mass": 0.4, "last_rows": 100},
        {"columns": 2000, "slashes": 1},
        {},
    ],
)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "i8"])
def test_columns_and_slashes(isa, dtype, options):
    rng = np.random.default_rng(11)
    batch = make_batch(rng, KV_LENS, QO_LENS)
    kv, keys, _ = fill(rng, batch, 2, 32, dtype)
    q = 3 * rng.standard_normal((sum(QO_LENS), 6, 32), np.float32)
    for arithmetic, rounded in arithmetics(dtype):
        visits = _core.Visits(batch.qo_indptr, batch.kv_len, 6, 2)
        _core.column_visits(
            visits,
            q,
            kv,
            *batch.lists,
            sink_tokens=3,
            local_tokens=70,
            arithmetic=arithmetic,
            **options,
        )
        scaled = rounded(q * np.float32(32**-0.5))
        check_lists(visits, batch, column_bounds(scaled, keys, batch, options), 3, 70)


def page_scores(q, k, block, stride: int, rounded: Rounding) -> np.ndarray:
    """float64 [pages up to the block's last row] of one head's rows q and keys k up to it."""
    end = len(k)
    pages = -(-end // 64)
    scale = q.shape[1] ** -0.5
    if stride == 0:
        products = rounded((q.mean(0) * scale).astype(np.float32)) @ k.T
        means = np.array([products[64 * i : 64 * (i + 1)].mean() for i in range(pages)])
        p = np.exp(means - means.max())
        return p / p.sum()
    rows, tokens = -(-len(q) // stride), pages * 64 // stride
    padded_q = np.zeros((rows * stride, q.shape[1]))
    padded_q[: len(q)] = rounded(q * np.float32(scale / stride))
    padded_k = np.zeros((pages * 64, q.shape[1]))
    padded_k[:end] = k
    cells = (
        padded_q.reshape(rows, stride, -1)[:, ::-1].reshape(rows, -1)
        @ padded_k.reshape(tokens, -1).T
    )
    last = block[3] + np.minimum((np.arange(rows) + 1) * stride, len(q)) - 1
    cells[np.arange(tokens)[None, :] * stride > last[:, None]] = -np.inf
    p = np.exp(cells - cells.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return p.sum(0).reshape(pages, -1).sum(1)


@pytest.mark.parametrize("stride", [0, 4, 8, 16, 32, 64])
@pytest.mark.parametrize(
    ("dtype", "limits"),
    [("f32", {"pages": 3}), ("i8", {"mass": 0.7}), ("bf16", {"mass": 0.9}), ("f16", {"pages": 1})],
)
def test_blocks(isa, dtype, stride, limits):
    rng = np.random.default_rng(stride)
    batch = make_batch(rng, KV_LENS, QO_LENS)
    kv, keys, _ = fill(rng, batch, 2, 32, dtype)
    q = rng.standard_normal((sum(QO_LENS), 6, 32), np.float32) * (1 if stride else 8)

    def choose(rounded: Rounding, sequence: int, kv_head: int, block) -> Bounds:
        length = int(batch.kv_len[sequence])
        bounds = np.zeros((2, length), bool)
        rows = slice(block[1], block[1] + block[2])
        end = block[2] + block[3]
        for head in range(kv_head * 3, (kv_head + 1) * 3):
            scores = page_scores(
                q[rows, head],
                keys[sequence][:end, kv_head].astype(np.float64),
                block,
                stride,
                rounded,
            )
            for i, some in enumerate(top(scores, limits.get("pages", 0), limits.get("mass", 0.0))):
                bounds[i] |= (
                    np.repeat(some, 64)[:length]
                    if len(some) * 64 >= length
                    else np.pad(np.repeat(some, 64), (0, length - 64 * len(some)))
                )
        return bounds[0], bounds[1]

    for arithmetic, rounded in arithmetics(dtype):
        visits = _core.Visits(batch.qo_indptr, batch.kv_len, 6, 2)
        _core.block_visits(
            visits,
            q,
            kv,
            *batch.lists,
            stride=stride,
            sink_tokens=3,
            local_tokens=70,
            arithmetic=arithmetic,
            **limits,
        )
        check_lists(visits, batch, partial(choose, rounded), 3, 70)


def test_short_sequences_visit_everything(isa):
    rng = np.random.default_rng(5)
    batch = make_batch(rng, [100, 700], [100, 100])
    kv, _, _ = fill(rng, batch, 1, 16, "f32")
    q = rng.standard_normal((200, 2, 16), np.float32)
    visits = _core.Visits(batch.qo_indptr, batch.kv_len, 2, 1)
    for choose in (_core.column_visits, _core.block_visits):
        visits.words[:] = 0
        choose(visits, q, kv, *batch.lists, min_tokens=101)
        masks = visited(visits, batch, 1)
        assert masks[0][0, np.tri(100, dtype=bool)].all()
        assert not masks[1][0, :, :500].any()


def test_refused():
    rng = np.random.default_rng(6)
    batch = make_batch(rng, [100], [80])
    kv, _, _ = fill(rng, batch, 1, 16, "f32")
    q = rng.standard_normal((80, 2, 16), np.float32)
    visits = _core.Visits(batch.qo_indptr, batch.kv_len, 2, 1)
    other = _core.Visits(batch.qo_indptr, batch.kv_len, 3, 1)
    error = _core.InvalidArgumentError
    with pytest.raises(error, match=r"\[paged_attention\] visits: expected lists of this batch"):
        _core.paged_attention(q, kv, *batch.lists, visits=other)
    for name, value in (
        ("columns", -1),
        ("slash_mass", 1.5),
        ("column_mass", float("nan")),
        ("last_rows", 0),
        ("row_stride", -2),
        ("sink_tokens", -1),
        ("local_tokens", -1),
        ("min_tokens", -1),
        ("sm_scale", float("inf")),
    ):
        with pytest.raises(error, match=rf"\[column_visits\] {name.split('_mass')[0]}"):
            _core.column_visits(visits, q, kv, *batch.lists, **{name: value})
    for name, value in (
        ("stride", 3),
        ("stride", 128),
        ("pages", -1),
        ("mass", -0.1),
        ("keys", -1),
        ("share", 1.5),
        ("share", float("nan")),
        ("queries", "median"),
    ):
        with pytest.raises(error, match=rf"\[block_visits\] ({name}|pages)"):
            _core.block_visits(visits, q, kv, *batch.lists, **{name: value})
    with pytest.raises(error, match=r"\[block_visits\] keys: expected 0, and share, with pages"):
        _core.block_visits(visits, q, kv, *batch.lists, keys=64, mass=0.5)
    with pytest.raises(error, match=r"\[block_visits\] stride: expected 0 with a probe query"):
        _core.block_visits(visits, q, kv, *batch.lists, stride=8, queries="probe", keys=64)
    with pytest.raises(error, match=r"\[visits\] qo_indptr"):
        _core.Visits(np.array([0, 5, 3], np.int32), np.array([9, 9], np.int32), 2, 1)
    with pytest.raises(error, match=r"\[visits\] num_qo_heads"):
        _core.Visits(batch.qo_indptr, batch.kv_len, 3, 2)


def test_numbers_that_are_none_do_no_harm(isa):
    rng = np.random.default_rng(7)
    batch = make_batch(rng, [300], [100])
    kv, _, _ = fill(rng, batch, 1, 16, "f32")
    q = np.full((100, 2, 16), np.nan, np.float32)
    visits = _core.Visits(batch.qo_indptr, batch.kv_len, 2, 1)
    _core.column_visits(visits, q, kv, *batch.lists, columns=4, slash_mass=0.5)
    _core.block_visits(visits, q, kv, *batch.lists, mass=0.5, stride=8)
    _core.block_visits(visits, q, kv, *batch.lists, queries="probe", keys=128)
    assert np.isnan(_core.paged_attention(q, kv, *batch.lists, visits=visits)).all()

"""Attention to keys in chunks: which of a row's queries meets which keys, against float64; and the
promise that a row's bits depend on the row alone."""

import numpy as np
import pytest

from effinfer import _core
from tests.ops.attention_reference import fill, make_batch
from tests.tolerance import BF16_EPS, assert_close

CHUNK = 256
KV_LENS = [1, 256, 257, 300, 511, 700, 1030, 1500]
QO_LENS = [1, 2, 257, 1, 0, 200, 520, 1]
SHAPES = [(3, 3, 16), (9, 3, 64), (4, 1, 80)]


def queries(rng, rows, heads, head_dim):
    return [rng.standard_normal((rows, heads, head_dim), np.float32) for _ in range(3)]


def reference(q, keys, values, batch, scale, visited=None):
    """The output in float64, and the magnitude of its rounding errors."""
    out, magnitude = np.zeros(q[0].shape), np.zeros(q[0].shape)
    for s, (k, v) in enumerate(zip(keys, values, strict=True)):
        rows = batch.rows(s)
        count = rows.stop - rows.start
        if count == 0:
            continue
        group = q[0].shape[1] // k.shape[1]
        k64, v64 = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
        place = np.arange(len(k))
        own = place[len(k) - count :]
        back = np.minimum(own[:, None] // CHUNK - place[None, :] // CHUNK, 2)
        seen = place[None, :] <= own[:, None]
        if visited is not None:
            seen = seen[None] & np.repeat(visited[s], group, axis=0)
        scores, spread = np.zeros((q[0].shape[1], count, len(k))), 0.0
        for distance, each in enumerate(q):
            x = each[rows].astype(np.float64)
            scores += np.einsum("thd,shd->hts", x, k64) * scale * (back == distance)
            spread = max(spread, np.einsum("thd,shd->hts", abs(x), abs(k64)).max() * scale)
        scores = np.where(seen, scores, -np.inf)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        out[rows] = np.einsum("hts,shd->thd", p, v64)
        magnitude[rows] = np.einsum("hts,shd->thd", p, abs(v64)) * (1 + spread)
    return out, magnitude


def attend(q, kv, batch, **options):
    return _core.paged_attention(
        q[0], kv, *batch.lists, chunk=CHUNK, q_before=q[1], q_far=q[2], **options
    )


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "i8"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_each_key_meets_the_query_of_its_chunk(isa, dtype, heads, kv_heads, head_dim):
    rng = np.random.default_rng(head_dim)
    batch = make_batch(rng, KV_LENS, QO_LENS)
    kv, keys, values = fill(rng, batch, kv_heads, head_dim, dtype)
    q = queries(rng, sum(QO_LENS), heads, head_dim)
    scale = np.float32(head_dim**-0.5)
    expected, magnitude = reference(q, keys, values, batch, scale)
    out = attend(q, kv, batch, sm_scale=scale)
    assert_close(out, expected, terms=head_dim + max(KV_LENS), magnitude=magnitude)
    if dtype == "bf16" and _core.has_avx512_bf16() and isa in ("avx512", "amx"):
        # Queries are rounded as well as probabilities, each of which moves a result by its own.
        out = attend(q, kv, batch, sm_scale=scale, arithmetic="bf16")
        assert_close(out, expected, magnitude=magnitude, eps=BF16_EPS)


def test_a_row_has_its_bits_whatever_stands_beside_it(isa):
    rng = np.random.default_rng(5)
    batch = make_batch(rng, KV_LENS, QO_LENS)
    kv, _, _ = fill(rng, batch, 3, 64, "bf16")
    q = queries(rng, sum(QO_LENS), 9, 64)
    expected = attend(q, kv, batch)
    for s, (length, rows) in enumerate(zip(KV_LENS, QO_LENS, strict=True)):
        own = [each[batch.rows(s)] for each in q]
        for first in range(0, rows, 67):
            last = min(first + 67, rows)
            alone = batch.part(s, length - rows + first, length - rows + last)
            got = attend([each[first:last] for each in own], kv, alone)
            np.testing.assert_array_equal(got, expected[batch.rows(s)][first:last])


def test_equal_queries_are_dense_attention(isa):
    rng = np.random.default_rng(6)
    batch = make_batch(rng, KV_LENS, QO_LENS)
    kv, _, _ = fill(rng, batch, 3, 64, "bf16")
    q = queries(rng, sum(QO_LENS), 9, 64)[0]
    dense = _core.paged_attention(q, kv, *batch.lists)
    np.testing.assert_array_equal(attend([q, q, q], kv, batch), dense)


def test_a_tree_within_a_page_has_the_bits_of_its_paths(isa):
    rng = np.random.default_rng(7)
    lengths = 3 * CHUNK + 5
    parents = np.array([-1, 0, 1, 0], np.int32)
    batch = make_batch(rng, [lengths], [4])
    kv, _, _ = fill(rng, batch, 1, 64, "f32")
    q = queries(rng, 4, 2, 64)
    tree = attend(q, kv, batch, parents=parents)
    chain = attend([each[:3] for each in q], kv, batch.part(0, lengths - 4, lengths - 1))
    np.testing.assert_array_equal(tree[:3], chain)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk": 100}, "chunk: expected a multiple of 256"),
        ({"chunk": -256}, "chunk: expected 0 or more"),
        ({"chunk": 0}, "chunk: expected a positive number"),
        ({"q_far": None}, "q_far: expected an array with chunk"),
        ({"q_before": np.zeros((1, 2, 8), np.float32)}, "q_before"),
        ({"window_left": 5}, "window_left: expected -1 with chunk"),
    ],
)
def test_bad_input(options, message):
    rng = np.random.default_rng(8)
    batch = make_batch(rng, [300], [1])
    kv, _, _ = fill(rng, batch, 1, 16, "f32")
    q = np.zeros((1, 2, 16), np.float32)
    given = {"chunk": CHUNK, "q_before": q, "q_far": q, **options}
    with pytest.raises(_core.InvalidArgumentError, match=r"^\[paged_attention\] " + message):
        _core.paged_attention(q, kv, *batch.lists, **given)

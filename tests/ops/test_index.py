"""Index lists: what they hold, and attention over them against dense attention."""

import numpy as np
import pytest

from effinfer import InvalidArgumentError, ops
from tests.ops.batches import Paged, Shape, as_dtype, offsets, values_of
from tests.ops.reference import assert_attention, attend, join, seen
from tests.ops.score_reference import probabilities

ROWS = [1, 0, 100, 201]
KEYS = [130, 7, 100, 333]
HEADS = (6, 2, 64)
EVERYTHING = 1 << 20


def i32(*values):
    return np.array(values, np.int32)


def make(rng, dtype="float32", rows=ROWS, keys=KEYS, heads=HEADS):
    shape = Shape(*heads)
    q = as_dtype(rng.standard_normal((sum(rows), shape.num_qo_heads, shape.head_dim)), dtype)
    k, v = (
        as_dtype(rng.standard_normal((sum(keys), shape.num_kv_heads, shape.head_dim)), dtype)
        for _ in range(2)
    )
    return q, k, v, {"qo_indptr": offsets(rows), "kv_indptr": offsets(keys)}


def attention(index, q, k, v):
    out = np.empty_like(q)
    lse = np.empty(q.shape[:2], np.float32)
    plan = index.plan(q.shape[-1])
    plan.run(q, k, v, out, lse)
    return out, lse


def visited(index):
    """[KV heads, rows, keys]: what every row visits of its sequence, causality included."""
    most = int(index.kv_len.max())
    seen_by = np.zeros((index.num_kv_heads, int(index.qo_indptr[-1]), most), bool)
    for i, (s, head, first, count) in enumerate(index.lists):
        for begin, end in index.spans[index.indptr[i] : index.indptr[i + 1]]:
            seen_by[head, first : first + count, begin:end] = True
        for row in range(first, first + count):
            if index.causal:
                seen_by[head, row, row + index.kv_len[s] - index.qo_indptr[s + 1] + 1 :] = False
    return seen_by


def check(index, q, k, v, dtype="float32"):
    """Attention over the lists is attention with their mask."""
    out, lse = attention(index, q, k, v)
    mask = np.repeat(visited(index), index.num_qo_heads // index.num_kv_heads, axis=0)
    starts = offsets(list(index.kv_len))
    exact = [values_of(x, dtype) for x in (q, k, v)]
    parts = []
    for s, length in enumerate(index.kv_len):
        rows = slice(index.qo_indptr[s], index.qo_indptr[s + 1])
        keys = slice(starts[s], starts[s + 1])
        parts.append(attend(exact[0][rows], exact[1][keys], exact[2][keys], mask[:, rows, :length]))
    bf16 = dtype == "bfloat16"
    assert_attention(values_of(out, dtype), lse, join(parts), dtype=dtype, bf16_products=bf16)


def shape_of(rows=ROWS, keys=KEYS):
    return offsets(rows), np.array(keys, np.int32), HEADS[0], HEADS[1]


def full():
    return ops.a_shape_index(*shape_of(), local_tokens=EVERYTHING)


METHODS = {
    "a_shape": lambda q, k, **lists: full(),
    "vertical": lambda q, k, **lists: ops.vertical_slash_index(
        q, k, vertical_size=EVERYTHING, slash_size=0, sink_tokens=0, local_tokens=0, **lists
    ),
    "slash": lambda q, k, **lists: ops.vertical_slash_index(
        q, k, vertical_size=0, slash_size=EVERYTHING, sink_tokens=0, local_tokens=0, **lists
    ),
    "sampled": lambda q, k, **lists: ops.sampled_index(
        q, k, sample_ratio=1, mass=1, local_tokens=0, sink_tokens=0, **lists
    ),
    "mean": lambda q, k, **lists: ops.block_score_index(q, k, num_blocks=EVERYTHING, **lists),
    "antidiagonal": lambda q, k, **lists: ops.block_score_index(
        q, k, num_blocks=EVERYTHING, method="antidiagonal", block_size=64, **lists
    ),
}


@pytest.mark.parametrize("method", METHODS)
def test_all_the_budget_is_dense_attention(isa, method):
    q, k, v, lists = make(np.random.default_rng(0))
    index = METHODS[method](q, k, **lists)
    assert index.density == 1
    np.testing.assert_array_equal(visited(index), visited(full()))
    wrapper = ops.BatchPrefillWithRaggedKVCacheWrapper()
    wrapper.plan(*lists.values(), *HEADS, causal=True)
    dense, dense_lse = wrapper.run(q, k, v, return_lse=True)
    out, lse = attention(index, q, k, v)
    np.testing.assert_allclose(out, dense, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, dense_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_over_lists(isa, dtype):
    q, k, v, lists = make(np.random.default_rng(1), dtype)
    for index in (
        ops.a_shape_index(*shape_of(), sink_tokens=5, local_tokens=40, block_size=32),
        ops.vertical_slash_index(
            q, k, vertical_size=9, slash_size=9, last_q=20, sink_tokens=0, local_tokens=0, **lists
        ),
        ops.sampled_index(q, k, mass=0.3, sink_tokens=0, local_tokens=0, block_size=16, **lists),
        ops.block_score_index(q, k, num_blocks=1, block_size=32, **lists),
        ops.block_score_index(q, k, mass=0.2, method="antidiagonal", block_size=32, **lists),
    ):
        assert 0 < index.density < 1
        check(index, q, k, v, dtype)


def test_not_causal(isa):
    q, k, v, lists = make(np.random.default_rng(2))
    index = ops.block_score_index(q, k, num_blocks=2, block_size=16, causal=False, **lists)
    check(index, q, k, v)
    everything = ops.block_score_index(q, k, num_blocks=EVERYTHING, causal=False, **lists)
    assert everything.density == 1 and not everything.causal


def test_lists_are_blocks_of_rows_with_their_own_keys():
    index = ops.a_shape_index(*shape_of(), sink_tokens=0, local_tokens=0, block_size=64)
    # 201 rows from position 132 on: blocks begin at 192, 256 and 320.
    of_last = index.lists[(index.lists[:, 0] == 3) & (index.lists[:, 1] == 1)]
    np.testing.assert_array_equal(of_last[:, 2:], [[101, 60], [161, 64], [225, 64], [289, 13]])
    np.testing.assert_array_equal(
        index.spans[-4:], [[132, 192], [192, 256], [256, 320], [320, 333]]
    )
    assert 0 not in index.tokens


def test_a_shape():
    index = ops.a_shape_index(*shape_of(), sink_tokens=3, local_tokens=20, block_size=1)
    position = np.concatenate([np.arange(m - n, m) for n, m in zip(ROWS, KEYS, strict=True)])
    key = np.arange(max(KEYS))
    far = position[:, None] - key
    want = (far >= 0) & ((far < 20) | (key < 3))
    for head in visited(index):
        np.testing.assert_array_equal(head, want)


def test_vertical_slash_takes_the_highest(isa):
    rng = np.random.default_rng(3)
    q, k, _, _ = make(rng, rows=[300], keys=[300], heads=(2, 2, 32))
    index = ops.vertical_slash_index(
        q, k, vertical_size=10, slash_size=5, last_q=50, sink_tokens=0, local_tokens=0, block_size=1
    )
    p, _ = probabilities(q[-50:], k, seen(50, 300, True))
    for head in range(2):
        columns = np.argsort(-p[head].sum(0))[:10]
        rows = visited(index)[head]
        near = [0]
        sums = np.array([np.trace(p[head], 250 - d) for d in range(300)])
        far = np.array(sorted({*near, *np.argsort(-sums)[:5]}))
        want = np.zeros_like(rows)
        want[:, columns] = True
        for row in range(300):
            want[row, row - far[far <= row]] = True
        np.testing.assert_array_equal(rows, want & seen(300, 300, True))


STRIPES = [50, 51, 200, 333]


def planted(slash):
    """Keys that all rows look for; with `slash` each row also looks for the key 37 places back."""
    rng = np.random.default_rng(4)
    tokens, dim = 512, 64
    marker = rng.standard_normal(dim) * 1.5
    k = rng.standard_normal((tokens, 1, dim)) * 0.1
    k[STRIPES, 0] += marker
    q = rng.standard_normal((tokens, 2, dim)) * 0.1 + marker
    if slash:
        moving = rng.standard_normal((tokens + 37, dim))
        k[:, 0] += moving[37:]
        q += moving[:tokens, None]
    q, k = q.astype(np.float32), k.astype(np.float32)
    return q, k, probabilities(q, k, seen(tokens, tokens, True))[0][0]


def test_planted_stripes_and_slashes_are_found(isa):
    q, k, p = planted(True)
    options = {"sink_tokens": 0, "local_tokens": 0, "block_size": 16}
    index = ops.vertical_slash_index(q, k, vertical_size=8, slash_size=4, **options)
    assert index.density < 0.25
    assert (p * visited(index)[0]).sum(1)[64:].mean() > 0.95
    window = ops.a_shape_index(
        i32(0, 512), i32(512), 2, 1, **{**options, "sink_tokens": 8, "local_tokens": 64}
    )
    assert (p * visited(window)[0]).sum(1)[64:].mean() < 0.9


def test_planted_stripes_are_found_by_samples(isa):
    q, k, p = planted(False)
    index = ops.sampled_index(q, k, mass=0.9, sink_tokens=0, local_tokens=0, block_size=16)
    assert set(STRIPES) <= set(np.flatnonzero(visited(index)[0, -1]))
    assert index.density < 0.25
    assert (p * visited(index)[0]).sum(1)[340:].mean() > 0.9


@pytest.mark.parametrize("method", ["mean", "antidiagonal"])
def test_planted_blocks_are_found(isa, method):
    """Each block of rows looks for one block of keys."""
    rng = np.random.default_rng(5)
    blocks, size, dim = 16, 32, 64
    topics = rng.standard_normal((blocks, dim))
    wanted = np.array([rng.integers(0, i + 1) for i in range(blocks)])
    noise = rng.standard_normal((2, blocks * size, 1, dim)) * 0.3
    k = (np.repeat(topics, size, axis=0)[:, None] + noise[0]).astype(np.float32)
    q = (np.repeat(topics[wanted], size, axis=0)[:, None] + noise[1]).astype(np.float32)
    index = ops.block_score_index(
        q, k, num_blocks=1, method=method, stride=8, block_size=size, sm_scale=0.5
    )
    for i, (_, _, first, _) in enumerate(index.lists):
        spans = index.spans[index.indptr[i] : index.indptr[i + 1]]
        tokens = np.concatenate([np.arange(*span) for span in spans])
        own = first // size
        assert set(tokens // size) == {own, wanted[own]}
    by_mass = ops.block_score_index(
        q, k, mass=0.5, method=method, stride=8, block_size=size, sm_scale=0.5
    )
    assert by_mass.density < 0.4


def test_antidiagonal_scores_are_softmaxes_of_strided_rows():
    """XAttention's reference: rows i of a stride, reversed, beside each other."""
    rng = np.random.default_rng(6)
    size, stride, n = 16, 4, 160
    q, k, _, _ = make(rng, rows=[n], keys=[n], heads=(1, 1, 32))
    wide_q = q[:, 0].reshape(-1, stride, 32)[:, ::-1].reshape(n // stride, -1).astype(np.float64)
    wide_k = k[:, 0].reshape(n // stride, -1).astype(np.float64)
    logits = wide_q @ wide_k.T / np.sqrt(32) / stride
    logits[np.triu_indices(n // stride, 1)] = -np.inf
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    each = n // size
    sums = p.reshape(each, size // stride, each, size // stride).sum((1, 3))
    index = ops.block_score_index(
        q, k, num_blocks=2, method="antidiagonal", stride=stride, block_size=size
    )
    for i in range(each):
        spans = index.spans[index.indptr[i] : index.indptr[i + 1]]
        blocks = {t // size for span in spans for t in range(*span)}
        assert blocks == {i, *np.argsort(-sums[i, : i + 1])[:2]}


def test_lists_of_a_kv_head_are_the_union_of_its_group():
    q, k, _, _ = make(np.random.default_rng(7), rows=[200], keys=[200], heads=(4, 1, 32))
    options = {"vertical_size": 6, "slash_size": 3, "sink_tokens": 0, "local_tokens": 0}
    both = visited(ops.vertical_slash_index(q, k, **options))[0]
    each = [visited(ops.vertical_slash_index(q[:, h : h + 1], k, **options))[0] for h in range(4)]
    np.testing.assert_array_equal(both, np.logical_or.reduce(each))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_give_the_lists_of_ragged_keys(layout):
    rng = np.random.default_rng(8)
    batch = Paged(rng, [300, 40], 16, layout=layout)
    rows = [150, 40]
    q = batch.queries(rows)
    k = np.concatenate(batch.keys).astype(np.float32)
    pages = {
        "kv_indptr": batch.kv_indptr,
        "kv_indices": batch.kv_indices,
        "kv_len": batch.kv_len,
        "kv_layout": layout,
    }
    ragged = {"kv_indptr": offsets(batch.kv_lens)}
    for make_index in (
        lambda keys, **lists: ops.vertical_slash_index(
            q, keys, vertical_size=9, slash_size=7, qo_indptr=offsets(rows), **lists
        ),
        lambda keys, **lists: ops.block_score_index(
            q, keys, num_blocks=1, block_size=32, qo_indptr=offsets(rows), **lists
        ),
    ):
        paged_index, ragged_index = make_index(batch.cache[0], **pages), make_index(k, **ragged)
        np.testing.assert_array_equal(paged_index.spans, ragged_index.spans)
        np.testing.assert_array_equal(paged_index.indptr, ragged_index.indptr)


def test_cost_follows_density():
    q, k, _, lists = make(np.random.default_rng(9), rows=[1000], keys=[1000])
    dense = (
        ops.a_shape_index(i32(0, 1000), i32(1000), 6, 2, local_tokens=EVERYTHING)
        .plan(64)
        .num_products
    )
    for size in (5, 50, 200):
        index = ops.vertical_slash_index(
            q, k, vertical_size=size, slash_size=0, local_tokens=0, sink_tokens=0, **lists
        )
        assert index.plan(64).num_products == pytest.approx(index.density * dense)


@pytest.mark.parametrize("group", [1, 3])
def test_topk_pages(group):
    rng = np.random.default_rng(10)
    batch = Paged(rng, [300, 16, 1], 16, shape=Shape(2 * group, 2, 32))
    q = batch.queries([1, 1, 1])
    pages = {"kv_indptr": batch.kv_indptr, "kv_indices": batch.kv_indices, "kv_len": batch.kv_len}
    bounds = ops.page_bounds(batch.cache[0], **pages)
    assert bounds.shape == (2, *batch.cache[0].shape[:1], 2, 32)
    index = ops.topk_pages(q, bounds, num_pages=4, page_size=16, **pages)
    scores = []
    for s, keys in enumerate(batch.keys):
        for begin in range(0, len(keys), 16):
            page = np.repeat(keys[begin : begin + 16], group, axis=1)
            low, high = q[s] * page.min(0), q[s] * page.max(0)
            scores.append(np.maximum(low, high).sum(-1))
    scores = np.array(scores).T.reshape(2, group, -1).max(1).astype(np.float32)
    starts = offsets([19, 1, 1])
    for i, (s, head, _, _) in enumerate(index.lists):
        tokens = {
            t for span in index.spans[index.indptr[i] : index.indptr[i + 1]] for t in range(*span)
        }
        best = np.argsort(-scores[head, starts[s] : starts[s + 1]])[:4]
        want = {t for page in best for t in range(16 * page, 16 * page + 16)}
        last = batch.kv_lens[s] - 1
        assert tokens == {t for t in want if t <= last} | {last}
    again = ops.topk_pages(
        q, scores=scores, num_kv_heads=2, num_pages=4, page_size=16, kv_len=batch.kv_len
    )
    np.testing.assert_array_equal(again.spans, index.spans)


def test_page_bounds_of_ragged_keys():
    k = np.random.default_rng(11).standard_normal((50, 2, 16)).astype(np.float32)
    bounds = ops.page_bounds(k, kv_indptr=i32(0, 20, 50), page_size=8)
    assert bounds.shape == (2, 3 + 4, 2, 16)
    np.testing.assert_array_equal(bounds[0, 2], k[16:20].min(0))
    np.testing.assert_array_equal(bounds[1, 3], k[20:28].max(0))


def test_nan_scores_do_no_harm():
    scores = np.full((2, 20), np.nan, np.float32)
    q = np.zeros((1, 2, 16), np.float32)
    options = {"page_size": 16, "kv_len": i32(320), "scores": scores, "num_kv_heads": 2}
    assert ops.topk_pages(q, num_pages=3, **options).density < 0.25


@pytest.mark.parametrize(
    ("function", "change", "message"),
    [
        (ops.vertical_slash_index, {"vertical_size": -1}, "vertical_size: expected 0 or more"),
        (ops.vertical_slash_index, {"last_q": 200}, "last_q: expected 1 to 128"),
        (ops.vertical_slash_index, {"block_size": 0}, "block_size: expected a positive"),
        (ops.vertical_slash_index, {"sink_tokens": -1}, "sink_tokens: expected 0 or more"),
        (ops.vertical_slash_index, {"local_tokens": -1}, "local_tokens: expected 0 or more"),
        (ops.vertical_slash_index, {"qo_indptr": i32(0, 9)}, "qo_indptr: expected 10 last"),
        (ops.sampled_index, {"sample_ratio": 0}, "sample_ratio: expected"),
        (ops.sampled_index, {"mass": 2.0}, "mass: expected"),
        (ops.block_score_index, {}, "num_blocks: expected either"),
        (ops.block_score_index, {"mass": np.nan}, "mass: expected"),
        (ops.block_score_index, {"num_blocks": 1, "mass": 0.5}, "num_blocks: expected either"),
        (ops.block_score_index, {"num_blocks": 1, "method": "max"}, "method: expected"),
        (
            ops.block_score_index,
            {"num_blocks": 1, "method": "antidiagonal", "stride": 7},
            "stride: expected a divisor",
        ),
    ],
)
def test_wrong_arguments(function, change, message):
    q, k, _, _ = make(np.random.default_rng(12), rows=[10], keys=[30])
    with pytest.raises(InvalidArgumentError, match=message):
        function(q, k, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bounds": None}, "bounds: expected either bounds or scores"),
        ({"bounds": np.zeros((2, 1, 2, 16), np.float32)}, "bounds: expected shape"),
        ({"num_pages": -1}, "num_pages: expected"),
        ({"page_size": 0}, "page_size: expected"),
        ({"kv_len": i32(3, 4)}, "qo_indptr: expected 3 values"),
        ({"bounds": None, "scores": np.zeros((2, 3), np.float32)}, "num_kv_heads: expected"),
    ],
)
def test_wrong_pages(change, message):
    given = {"bounds": np.zeros((2, 4, 2, 16), np.float32), "kv_len": i32(64)}
    arguments = {"num_pages": 1, "page_size": 16, **given, **change}
    with pytest.raises(InvalidArgumentError, match=message):
        ops.topk_pages(np.zeros((1, 2, 16), np.float32), **arguments)


def test_more_rows_than_keys():
    with pytest.raises(InvalidArgumentError, match=r"kv_len\[0\]: expected at least its 9 query"):
        ops.a_shape_index(i32(0, 9), i32(5), 1, 1)

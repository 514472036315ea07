"""Attention scores of keys against float64."""

import numpy as np
import pytest
import torch

from effinfer import InvalidArgumentError, ops
from tests.ops.batches import Paged, Shape, as_dtype, as_torch, offsets, values_of
from tests.ops.reference import seen
from tests.ops.score_reference import by_distance, probabilities, ragged
from tests.tolerance import assert_close

# Query rows and keys of sequences.
ROWS = [1, 0, 77, 130, 5]
KEYS = [301, 4, 77, 333, 64]


def make(rng, dtype="float32", heads=(4, 2, 64), rows=ROWS, keys=KEYS):
    shape = Shape(*heads)
    q = rng.standard_normal((sum(rows), shape.num_qo_heads, shape.head_dim)) * 2
    k = rng.standard_normal((sum(keys), shape.num_kv_heads, shape.head_dim))
    return as_dtype(q, dtype), as_dtype(k, dtype), offsets(rows), offsets(keys)


def close(got, want, spread, q, keys=KEYS, rows=ROWS):
    """A probability's error is that of its logit and of the row's sum."""
    terms = q.shape[-1] + max(keys) + max(rows)
    assert_close(got, want, terms=terms, magnitude=want * (1 + 2 * spread) + 1e-30)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
def test_sums_and_maxima(isa, dtype, causal):
    q, k, qo, kv = make(np.random.default_rng(7), dtype)
    p, spread = ragged(values_of(q, dtype), values_of(k, dtype), qo, kv, causal)
    lists = {"qo_indptr": qo, "kv_indptr": kv, "causal": causal}
    sums = ops.attention_scores(q, k, **lists)
    close(sums, np.concatenate([x.sum(1) for x in p], axis=1), spread, q)
    most = ops.attention_scores(q, k, reduce="max", **lists)
    close(most, np.concatenate([x.max(1, initial=0) for x in p], axis=1), spread, q)


@pytest.mark.parametrize("heads", [(1, 1, 16), (6, 3, 40), (8, 1, 128), (96, 2, 32)])
def test_heads(isa, heads):
    q, k, qo, kv = make(np.random.default_rng(1), heads=heads)
    p, spread = ragged(q, k, qo, kv, True)
    got = ops.attention_scores(q, k, qo_indptr=qo, kv_indptr=kv)
    close(got, np.concatenate([x.sum(1) for x in p], axis=1), spread, q)


@pytest.mark.parametrize("options", [{"window_left": 40}, {"soft_cap": 3.0}])
def test_options(isa, options):
    q, k, qo, kv = make(np.random.default_rng(2))
    p, spread = ragged(q, k, qo, kv, True, **options)
    names = {"soft_cap": "logits_soft_cap"}
    options = {names.get(name, name): value for name, value in options.items()}
    got = ops.attention_scores(q, k, qo_indptr=qo, kv_indptr=kv, **options)
    close(got, np.concatenate([x.sum(1) for x in p], axis=1), spread, q)


@pytest.mark.parametrize("rows", [[1, 0, 77, 128, 5], [64, 1, 1, 2, 3]])
def test_diagonals(isa, rows):
    q, k, qo, kv = make(np.random.default_rng(3), rows=rows)
    p, spread = ragged(q, k, qo, kv, True)
    sums, diagonals = ops.attention_scores(q, k, qo_indptr=qo, kv_indptr=kv, diagonals=True)
    close(sums, np.concatenate([x.sum(1) for x in p], axis=1), spread, q)
    close(diagonals, np.concatenate([by_distance(x) for x in p], axis=1), spread, q)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages(isa, dtype, layout):
    rng = np.random.default_rng(4)
    batch = Paged(rng, [300, 0, 17], 16, kv_dtype=dtype, layout=layout)
    rows = [70, 0, 3]
    q_dtype = "bfloat16" if dtype == "float8_e4m3fn" else "float32"
    q = batch.queries(rows, q_dtype)
    k_scale = 1 / 32 if dtype == "int8" else 1.0
    starts, exact = offsets(rows), values_of(q, q_dtype)
    parts = [
        probabilities(exact[starts[s] : starts[s + 1]], keys * k_scale, seen(n, len(keys), True))
        for s, (n, keys) in enumerate(zip(rows, batch.keys, strict=True))
    ]
    got = ops.attention_scores(
        q,
        batch.cache[0],
        qo_indptr=starts,
        kv_indptr=batch.kv_indptr,
        kv_indices=batch.kv_indices,
        kv_len=batch.kv_len,
        kv_layout=layout,
        k_scale=k_scale,
    )
    spread = max(spread for _, spread in parts)
    close(got, np.concatenate([p.sum(1) for p, _ in parts], axis=1), spread, q)


def test_scale_of_keys(isa):
    q, k, qo, kv = make(np.random.default_rng(14), rows=[1, 0, 7, 9, 5])
    lists = {"qo_indptr": qo, "kv_indptr": kv}
    expected = ops.attention_scores(q, k * np.float32(0.5), **lists)
    for scale in (0.5, np.array(0.5, np.float32), np.full(k.shape[:2], 0.5, np.float32)):
        got = ops.attention_scores(q, k, k_scale=scale, **lists)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)


def test_positions(isa):
    rng = np.random.default_rng(5)
    q, k, qo, kv = make(rng, rows=[3, 0, 4, 90, 5])
    positions = np.concatenate(
        [np.sort(rng.choice(m, n, False)) for n, m in zip(np.diff(qo), KEYS, strict=True)]
    ).astype(np.int32)
    want, spreads = [], []
    for s, m in enumerate(KEYS):
        rows = slice(qo[s], qo[s + 1])
        mask = np.arange(m) <= positions[rows, None]
        p, spread = probabilities(q[rows], k[kv[s] : kv[s + 1]], mask)
        want.append(p.sum(1))
        spreads.append(spread)
    got = ops.attention_scores(q, k, qo_indptr=qo, kv_indptr=kv, positions=positions)
    close(got, np.concatenate(want, axis=1), max(spreads), q)


@pytest.mark.parametrize("lse_base", ["log2", "ln"])
def test_lse_of_an_attention_call(isa, lse_base):
    rng = np.random.default_rng(6)
    q, k, _, _ = make(rng, rows=[50], keys=[200])
    _, lse = ops.single_prefill_with_kv_cache(
        q, k, k, causal=True, return_lse=True, lse_base=lse_base
    )
    got = ops.attention_scores(q, k, lse=lse, lse_base=lse_base)
    np.testing.assert_allclose(got, ops.attention_scores(q, k), rtol=1e-5, atol=1e-9)
    # A row that sees nothing adds nothing.
    lse[10] = -np.inf
    without = ops.attention_scores(q, k, lse=lse, lse_base=lse_base)
    np.testing.assert_allclose(without.sum(1), 49, rtol=1e-5)


def test_same_bits_for_any_batch_and_team():
    q, k, qo, kv = make(np.random.default_rng(8))
    want = ops.attention_scores(q, k, qo_indptr=qo, kv_indptr=kv, pool=ops.ThreadPool(1))
    for threads in (2, 3):
        pool = ops.ThreadPool(threads, oversubscribe=True)
        got = ops.attention_scores(q, k, qo_indptr=qo, kv_indptr=kv, pool=pool)
        np.testing.assert_array_equal(got, want)
    for s in range(len(ROWS)):
        alone = ops.attention_scores(q[qo[s] : qo[s + 1]], k[kv[s] : kv[s + 1]])
        np.testing.assert_array_equal(alone, want[:, kv[s] : kv[s + 1]])


def test_kinds_of_arrays():
    q, k, _, _ = make(np.random.default_rng(9), "bfloat16", rows=[9], keys=[90])
    want = ops.attention_scores(q, k)
    got = ops.attention_scores(as_torch(q, "bfloat16"), as_torch(k, "bfloat16"))
    assert isinstance(got, torch.Tensor) and got.dtype == torch.float32
    np.testing.assert_array_equal(got.numpy(), want)
    out = np.empty_like(want)
    heads_first = k.swapaxes(0, 1).copy().view(k.dtype)
    assert ops.attention_scores(q, heads_first, kv_layout="HND", out=out) is out
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize("block_reduce", ["sum", "mean", "max"])
def test_pooled(pooling, block_reduce):
    q, k, qo, kv = make(np.random.default_rng(10))
    lists = {"qo_indptr": qo, "kv_indptr": kv}
    scores = ops.attention_scores(q, k, **lists).astype(np.float64)
    sums = scores.reshape(2, 2, -1).sum(1)
    reduce = {"avg": np.mean, "max": np.max, "mean": np.mean, "sum": np.sum}
    want = []
    for a, b in zip(kv, kv[1:], strict=False):
        padded = np.pad(sums[:, a:b], ((0, 0), (3, 3)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, 7, axis=1)
        smooth = reduce[pooling](windows, axis=-1)
        want += [reduce[block_reduce](smooth[:, i : i + 16], axis=1) for i in range(0, b - a, 16)]
    got = ops.pooled_attention_scores(
        q,
        k,
        block_size=16,
        block_reduce=block_reduce,
        kernel_size=7,
        pooling=pooling,
        group_heads=True,
        **lists,
    )
    np.testing.assert_allclose(got, np.stack(want, axis=1), rtol=1e-5)


def test_nothing_pooled_is_the_scores():
    q, k, qo, kv = make(np.random.default_rng(11))
    lists = {"qo_indptr": qo, "kv_indptr": kv, "reduce": "max"}
    got = ops.pooled_attention_scores(q, k, **lists)
    np.testing.assert_array_equal(got, ops.attention_scores(q, k, **lists))


def test_empty():
    q, k = np.zeros((0, 2, 16), np.float32), np.zeros((0, 2, 16), np.float32)
    assert ops.attention_scores(q, k).shape == (2, 0)
    assert (ops.attention_scores(q, np.ones((5, 2, 16), np.float32)) == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduce": "mean"}, "reduce: expected sum or max"),
        ({"kv_layout": "DHN"}, "kv_layout: expected NHD or HND"),
        ({"lse": np.zeros((3, 3), np.float32)}, "lse: expected shape"),
        ({"lse_base": "10"}, "lse_base: expected log2 or ln"),
        ({"positions": np.zeros(3, np.int32)}, "positions: expected shape"),
        ({"positions": np.full(50, 200, np.int32)}, r"positions\[0\]: expected"),
        ({"diagonals": True, "causal": False}, "diagonals: expected False without causal"),
        ({"diagonals": True, "reduce": "max"}, "diagonals: expected False with reduce max"),
        ({"qo_indptr": [0, 40]}, "qo_indptr: expected 50 last"),
        ({"qo_indptr": [0, 60, 50]}, "qo_indptr: expected"),
        ({"kv_indices": [0]}, "k: expected 4 dimensions"),
        ({"k": np.zeros((200, 3, 64), np.float32)}, "num_qo_heads: expected a multiple"),
        ({"k": np.zeros((200, 2, 32), np.float32)}, "k: expected shape"),
        ({"q": np.zeros((50, 4, 64), np.int32)}, "q: expected dtype"),
        ({"sm_scale": np.nan}, "sm_scale: expected a finite number"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap: expected"),
        ({"out": np.zeros((4, 100), np.float32)}, "out: expected float32"),
    ],
)
def test_wrong_arguments(change, message):
    arrays = {"q": np.zeros((50, 4, 64), np.float32), "k": np.zeros((200, 2, 64), np.float32)}
    arguments = {**arrays, **change}
    for name in ("qo_indptr", "kv_indices"):
        if name in change:
            arguments[name] = np.array(change[name], np.int32)
    with pytest.raises(InvalidArgumentError, match=message):
        ops.attention_scores(arguments.pop("q"), arguments.pop("k"), **arguments)


def test_too_many_rows_for_diagonals():
    q, k, _, _ = make(np.random.default_rng(12), rows=[129], keys=[200])
    with pytest.raises(InvalidArgumentError, match="diagonals: expected at most 128 query rows"):
        ops.attention_scores(q, k, diagonals=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel_size": 4}, "kernel_size: expected an odd number"),
        ({"pooling": "sum"}, "pooling: expected avg or max"),
        ({"block_reduce": "min"}, "block_reduce: expected"),
        ({"block_size": 0}, "block_size: expected"),
        ({"diagonals": True}, "diagonals: expected not given"),
    ],
)
def test_wrong_pooling(change, message):
    q, k, _, _ = make(np.random.default_rng(13), rows=[5], keys=[50])
    with pytest.raises(InvalidArgumentError, match=message):
        ops.pooled_attention_scores(q, k, **change)

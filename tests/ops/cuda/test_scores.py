"""What keys get of attention on a GPU, against float64 and the CPU."""

import numpy as np
import pytest

from effinfer import InvalidArgumentError, Queue, ops
from tests.ops.batches import Paged, Shape, as_dtype, offsets, values_of
from tests.ops.cuda.gpu_arrays import here, stream, there
from tests.ops.reference import seen
from tests.ops.score_reference import by_distance, probabilities, ragged

ROWS, KEYS = [3, 0, 18, 1], [40, 5, 270, 7]


def make(rng, dtype, heads=(4, 2, 64)):
    qo, kv, (num_heads, kv_heads, dim) = sum(ROWS), sum(KEYS), heads
    q, k = (
        as_dtype(rng.standard_normal((n, h, dim), np.float32), dtype)
        for n, h in ((qo, num_heads), (kv, kv_heads))
    )
    return q, k, {"qo_indptr": offsets(ROWS), "kv_indptr": offsets(KEYS)}


def close(got, want, spread):
    """Of float32 sums of products, and of the logarithm's."""
    error = spread * 2.0**-17
    np.testing.assert_allclose(here(got), want, rtol=error, atol=1e-7)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("heads", [(2, 1, 64), (1, 1, 128), (1, 1, 200), (1, 1, 8)])
@pytest.mark.parametrize("causal", [False, True])
def test_sums_and_maxima(dtype, heads, causal):
    rng = np.random.default_rng(heads[2])
    q, k, lists = make(rng, dtype, heads)
    parts, spread = ragged(
        values_of(q, dtype), values_of(k, dtype), offsets(ROWS), offsets(KEYS), causal
    )
    for reduce, over in (("sum", np.sum), ("max", np.max)):
        got = ops.attention_scores(there(q), there(k), causal=causal, reduce=reduce, **lists)
        assert got.device == "cuda:0"
        want = [over(p, axis=1) if p.shape[1] else p.sum(axis=1) for p in parts]
        close(got, np.concatenate(want, axis=1), spread)


@pytest.mark.parametrize("narrow", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize(("dim", "dtype"), [(64, "bfloat16"), (208, "bfloat16"), (80, "float32")])
def test_keys_of_8_bits(narrow, dim, dtype):
    rng = np.random.default_rng(dim)
    q, k, lists = make(rng, dtype, (2, 1, dim))
    k = as_dtype(rng.standard_normal(k.shape, np.float32), narrow)
    options = {"sm_scale": dim**-0.5 / 32} if narrow == "int8" else {}
    scale = 1 / 32 if narrow == "int8" else 1.0
    parts, spread = ragged(
        values_of(q, dtype), values_of(k, narrow) * scale, offsets(ROWS), offsets(KEYS), True
    )
    got = ops.attention_scores(there(q), there(k), causal=True, **options, **lists)
    close(got, np.concatenate([p.sum(axis=1) for p in parts], axis=1), spread)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_options(dtype):
    rng = np.random.default_rng(1)
    q, k, lists = make(rng, dtype)
    exact = values_of(q, dtype), values_of(k, dtype), offsets(ROWS), offsets(KEYS), True
    for options, given in (
        ({"window_left": 20}, {"window_left": 20}),
        ({"soft_cap": 3.0}, {"logits_soft_cap": 3.0}),
    ):
        parts, spread = ragged(*exact, **options)
        out = there(np.full((4, sum(KEYS)), 7, np.float32))
        got = ops.attention_scores(there(q), there(k), out=out, **given, **lists)
        assert got is out
        close(got, np.concatenate([p.sum(axis=1) for p in parts], axis=1), spread)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_and_sums_of_an_attention_call(layout):
    dtype, rows = "bfloat16", [2, 9, 0]
    batch = Paged(np.random.default_rng(2), [20, 90, 5], 16, Shape(4, 2, 64), dtype, layout)
    q, cache = batch.queries(rows, dtype), [there(x) for x in batch.cache]
    lists = {"qo_indptr": offsets(rows), "kv_indptr": batch.kv_indptr, "kv_len": batch.kv_len}
    lists |= {"kv_indices": batch.kv_indices, "kv_layout": layout}
    got = ops.attention_scores(there(q), cache[0], **lists)
    parts, exact = [], values_of(q, dtype)
    for s, n in enumerate(rows):
        part = exact[offsets(rows)[s] : offsets(rows)[s + 1]]
        mask = seen(n, batch.kv_lens[s], True)
        p, spread = probabilities(part, batch.keys[s], mask)
        parts.append(p.sum(axis=1))
    close(got, np.concatenate(parts, axis=1), 60)
    prefill = ops.BatchPrefillWithPagedKVCacheWrapper(None, layout)
    prefill.plan(offsets(rows), *batch.lists, 4, 2, 64, 16, causal=True)
    _, lse = prefill.run(there(q), tuple(cache), return_lse=True)
    again = ops.attention_scores(
        there(q), cache[0], lse=lse, pool=Queue("cuda:0", stream(25)), **lists
    )
    np.testing.assert_allclose(here(again), here(got), rtol=1e-6)
    # Some of the rows, at their positions.
    chosen = np.array([0, 3, 8])
    p, spread = probabilities(exact[2:], batch.keys[1], seen(9, 90, True))
    for sums in (there(here(lse)[2:][chosen]), None):
        some = ops.attention_scores(
            there(q[2:][chosen]), cache[0], lse=sums,
            positions=there((90 - 9 + chosen).astype(np.int32)), qo_indptr=offsets([0, 3, 0]),
            **{name: x for name, x in lists.items() if name != "qo_indptr"},
        )  # fmt: skip
        close(some[:, 20:110], p[:, chosen].sum(axis=1), spread)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("window_left", [-1, 30])
def test_rows_at_positions(dtype, window_left):
    q, k, lists = make(np.random.default_rng(5), dtype)
    rng = np.random.default_rng(6)
    positions = np.concatenate(
        [np.sort(rng.choice(m, n, replace=False)) for n, m in zip(ROWS, KEYS, strict=True)]
    )
    exact = values_of(q, dtype), values_of(k, dtype)
    want, spread = [], 0.0
    for s, length in enumerate(KEYS):
        rows = slice(*offsets(ROWS)[s : s + 2])
        distance = positions[rows, None] - np.arange(length)
        mask = (distance >= 0) & ((distance <= window_left) | (window_left < 0))
        p, more = probabilities(exact[0][rows], exact[1][slice(*offsets(KEYS)[s : s + 2])], mask)
        want.append(p.sum(axis=1))
        spread = max(spread, np.max(more, initial=0.0))
    got = ops.attention_scores(
        there(q), there(k), positions=there(positions.astype(np.int32)), window_left=window_left,
        **lists,
    )  # fmt: skip
    close(got, np.concatenate(want, axis=1), spread)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize(("rows", "keys"), [(ROWS, KEYS), ([128, 65, 1], [300, 65, 520])])
def test_diagonals(dtype, rows, keys):
    rng = np.random.default_rng(len(rows))
    q_dtype = "bfloat16" if dtype == "float8_e4m3fn" else dtype
    q = as_dtype(rng.standard_normal((sum(rows), 4, 32), np.float32), q_dtype)
    k = as_dtype(rng.standard_normal((sum(keys), 2, 32), np.float32), dtype)
    lists = {"qo_indptr": offsets(rows), "kv_indptr": offsets(keys)}
    parts, spread = ragged(
        values_of(q, q_dtype), values_of(k, dtype), offsets(rows), offsets(keys), True
    )
    got, diagonals = ops.attention_scores(there(q), there(k), diagonals=True, **lists)
    close(got, np.concatenate([p.sum(axis=1) for p in parts], axis=1), spread)
    want = np.concatenate([by_distance(p) for p in parts], axis=1)
    close(diagonals, want, spread)
    # Whatever order blocks come in.
    again = ops.attention_scores(there(q), there(k), diagonals=True, **lists)
    np.testing.assert_array_equal(here(again[1]), here(diagonals))


@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize("block_reduce", ["sum", "mean", "max"])
def test_pooled(pooling, block_reduce):
    q, k, lists = make(np.random.default_rng(3), "float16")
    options = {"pooling": pooling, "block_reduce": block_reduce, "kernel_size": 5, **lists}
    for more in ({"block_size": 7, "group_heads": True}, {"block_size": 1}):
        expected = ops.pooled_attention_scores(q, k, **options, **more)
        got = ops.pooled_attention_scores(there(q), there(k), **options, **more)
        np.testing.assert_allclose(here(got), expected, rtol=1e-3, atol=1e-6)


def test_what_is_refused():
    q, k, lists = make(np.random.default_rng(4), "bfloat16")
    for call, error, message in (
        (lambda: ops.attention_scores(there(q), k, **lists), InvalidArgumentError,
         r"k: expected a tensor on cuda:0, got one on cpu"),
        (lambda: ops.attention_scores(there(q), there(k), diagonals=True, causal=False, **lists),
         InvalidArgumentError, "diagonals: expected False without causal"),
    ):  # fmt: skip
        with pytest.raises(error, match=r"(.|\n)*" + message):
            call()

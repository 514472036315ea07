"""Paged attention against float64, and the promise that a row's bits depend on the row alone."""

import numpy as np
import pytest

from effinfer import _core
from tests.ops.attention_reference import fill, make_batch, reference, whole
from tests.tolerance import BF16_EPS, assert_close

DTYPES = ["f32", "f16", "bf16", "i8"]


def bf16_arithmetic() -> bool:
    """Whether the current level multiplies bfloat16."""
    return _core.has_avx512_bf16() and _core.current_isa() in ("avx512", "amx")


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Rounded to nearest even, as float32."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def check(rng, kv_lens, qo_lens, heads, kv_heads, head_dim, dtype, **options):
    batch = make_batch(rng, kv_lens, qo_lens)
    kv, keys, values = fill(rng, batch, kv_heads, head_dim, dtype)
    q = rng.standard_normal((int(batch.qo_indptr[-1]), heads, head_dim), np.float32)
    scale = head_dim**-0.5
    out = _core.paged_attention(q, kv, *batch.lists, sm_scale=scale, **options)
    masks = (
        options.get("window_left", -1),
        options.get("logits_soft_cap", 0.0),
        options.get("sink_tokens", 0),
        options.get("parents"),
    )
    expected, magnitude = reference(q, keys, values, batch, np.float32(scale), *masks)
    assert_close(out, expected, terms=head_dim + max(kv_lens), magnitude=magnitude)
    if dtype == "bf16" and bf16_arithmetic():
        # Queries are rounded after scaling; then each probability once.
        out = _core.paged_attention(
            q, kv, *batch.lists, sm_scale=scale, arithmetic="bf16", **options
        )
        rounded = to_bf16(q * np.float32(scale))
        expected, magnitude = reference(
            rounded, keys, values, batch, 1.0, *masks, of_probabilities=True
        )
        assert_close(out, expected, magnitude=magnitude, eps=BF16_EPS / 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(3, 3, 16), (9, 3, 64), (4, 1, 80), (9, 1, 128), (2, 2, 256)],
)
def test_ragged_batches(isa, dtype, heads, kv_heads, head_dim):
    rng = np.random.default_rng(head_dim)
    kv_lens = [1, 63, 64, 65, 130, 257, 700]
    qo_lens = [1, 40, 1, 17, 0, 3, 33]
    check(rng, kv_lens, qo_lens, heads, kv_heads, head_dim, dtype)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_long_sequences(isa, dtype):
    rng = np.random.default_rng(1)
    check(rng, [511, 512, 513, 1500], [1, 2, 1, 5], 9, 3, 64, dtype)


@pytest.mark.parametrize("window", [0, 1, 63, 100, 511])
@pytest.mark.parametrize("dtype", ["f32", "i8"])
def test_windows(isa, dtype, window):
    rng = np.random.default_rng(window)
    check(rng, [1, 65, 300, 900], [1, 65, 40, 20], 4, 1, 64, dtype, window_left=window)


@pytest.mark.parametrize(("window", "sinks"), [(0, 1), (70, 4), (100, 64), (200, 65), (130, 300)])
@pytest.mark.parametrize("dtype", ["bf16", "i8"])
def test_sinks(isa, dtype, window, sinks):
    rng = np.random.default_rng(window)
    lengths = [1, 65, 300, 901, 1500], [1, 65, 40, 20, 1]
    check(rng, *lengths, 6, 2, 64, dtype, window_left=window, sink_tokens=sinks)


def random_tree(rng, rows):
    return np.array([int(rng.integers(-1, i)) if i else -1 for i in range(rows)], np.int32)


@pytest.mark.parametrize("window", [-1, 0, 5, 80])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 1), (2, 2)])
def test_trees(isa, window, heads, kv_heads):
    rng = np.random.default_rng(7)
    for kv_lens, qo_lens in [
        ([64, 65, 700, 257, 300], [64, 10, 33, 1, 64]),
        ([1, 2, 130], [1, 2, 63]),
    ]:
        parents = np.concatenate([random_tree(rng, rows) for rows in qo_lens])
        options = {"window_left": window, "parents": parents, "sink_tokens": 3}
        check(rng, kv_lens, qo_lens, heads, kv_heads, 64, "bf16", **options)


def test_a_tree_without_branches_is_a_chain(isa):
    rng = np.random.default_rng(8)
    batch = make_batch(rng, [300, 90, 64], [9, 64, 1])
    kv, _, _ = fill(rng, batch, 3, 64, "bf16")
    q = rng.standard_normal((74, 9, 64), np.float32)
    parents = np.concatenate([np.arange(n) - 1 for n in (9, 64, 1)]).astype(np.int32)
    for window in (-1, 20):
        chain = _core.paged_attention(q, kv, *batch.lists, window_left=window)
        tree = _core.paged_attention(q, kv, *batch.lists, window_left=window, parents=parents)
        np.testing.assert_array_equal(tree, chain)


def test_a_tree_of_too_many_rows():
    batch = make_batch(np.random.default_rng(9), [80], [65])
    kv = _core.PagedKv(batch.num_pages, 1, 16)
    q = np.zeros((65, 1, 16), np.float32)
    with pytest.raises(_core.InvalidArgumentError, match="parents: expected at most 64 rows"):
        _core.paged_attention(q, kv, *batch.lists, parents=np.arange(65, dtype=np.int32) - 1)


def test_soft_cap(isa):
    rng = np.random.default_rng(2)
    check(rng, [65, 300], [30, 1], 6, 3, 32, "bf16", logits_soft_cap=2.5)
    check(rng, [65, 300], [30, 1], 6, 3, 32, "i8", logits_soft_cap=0.5, window_left=70)


def test_random_shapes(isa):
    rng = np.random.default_rng(3)
    for _ in range(8):
        count = int(rng.integers(1, 6))
        kv_lens = [int(n) for n in rng.integers(1, 600, count)]
        qo_lens = [int(rng.integers(0, min(n, 50) + 1)) for n in kv_lens]
        kv_heads = int(rng.integers(1, 4))
        group = int(rng.choice([1, 2, 5, 7, 64]))
        window = int(rng.choice([-1, 37, 200]))
        dtype = DTYPES[int(rng.integers(4))]
        shape = (kv_heads * group, kv_heads, int(rng.choice([16, 48, 96])))
        check(rng, kv_lens, qo_lens, *shape, dtype, window_left=window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [-1, 90])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (5, 1)])
def test_bits_depend_on_the_row_alone(isa, dtype, window, heads, kv_heads):
    options = {"window_left": window, "logits_soft_cap": 20.0}
    check_bits(dtype, heads, kv_heads, options)
    if dtype == "bf16" and bf16_arithmetic():
        check_bits(dtype, heads, kv_heads, {**options, "arithmetic": "bf16"})


def check_bits(dtype, heads, kv_heads, options):
    rng = np.random.default_rng(4)
    kv_lens = [530, 61, 256, 1]
    batch = make_batch(rng, kv_lens, kv_lens)
    kv, _, _ = fill(rng, batch, kv_heads, 48, dtype)
    q = rng.standard_normal((sum(kv_lens), heads, 48), np.float32)
    expected = _core.paged_attention(q, kv, *batch.lists, **options)
    for pool in [_core.ThreadPool(n, oversubscribe=True) for n in (1, 2, 3)]:
        got = _core.paged_attention(q, kv, *batch.lists, **options, pool=pool)
        np.testing.assert_array_equal(got, expected)
    for sequence, length in enumerate(kv_lens):
        rows = batch.rows(sequence)
        for step in (length, 100, 17):
            for first in range(0, length, step):
                last = min(first + step, length)
                alone = batch.part(sequence, first, last)
                got = _core.paged_attention(q[rows][first:last], kv, *alone.lists, **options)
                np.testing.assert_array_equal(got, expected[rows][first:last])
        for place in {0, length // 2, length - 2, length - 1, *range(250, 260)} & set(
            range(length)
        ):
            alone = batch.part(sequence, place, place + 1)
            got = _core.paged_attention(q[rows][place : place + 1], kv, *alone.lists, **options)
            np.testing.assert_array_equal(got[0], expected[rows][place])


def test_decode_batch_equals_one_at_a_time(isa):
    rng = np.random.default_rng(5)
    kv_lens = [int(n) for n in rng.integers(1, 1500, 16)]
    batch = make_batch(rng, kv_lens, [1] * 16)
    kv, _, _ = fill(rng, batch, 3, 64, "bf16")
    q = rng.standard_normal((16, 9, 64), np.float32)
    together = _core.paged_attention(q, kv, *batch.lists)
    for s, length in enumerate(kv_lens):
        alone = batch.part(s, length - 1, length)
        got = _core.paged_attention(q[s : s + 1], kv, *alone.lists)
        np.testing.assert_array_equal(got[0], together[s])


def test_empty_batches(isa):
    kv = _core.PagedKv(1, 1, 16)
    none = np.zeros(0, np.int32)
    start = np.zeros(1, np.int32)
    out = _core.paged_attention(np.zeros((0, 2, 16), np.float32), kv, start, start, none, none)
    assert out.shape == (0, 2, 16)
    _core.kv_append(kv, *[np.zeros((0, 1, 16), np.float32)] * 2, start, start, none, none)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("power", [10, 27, 33, 45, 80])
def test_logits_of_any_size(isa, dtype, power):
    """Of integers and a scale that are exact: beside the greatest logits no weight is left, and
    what is alike counts alike."""
    rng = np.random.default_rng(power)
    batch = make_batch(rng, [1, 300, 900], [1, 7, 70])
    kv = _core.PagedKv(batch.num_pages, 2, 16, dtype)
    full = whole(batch)
    keys = rng.integers(-4, 5, (int(full.qo_indptr[-1]), 2, 16)).astype(np.float32)
    values = rng.integers(-99, 100, keys.shape).astype(np.float32)
    _core.kv_append(kv, keys, values, *full.lists)
    q = rng.integers(-4, 5, (78, 6, 16)).astype(np.float32) * np.float32(2.0**power)
    of_sequences = [np.split(x, full.qo_indptr[1:-1]) for x in (keys, values)]
    expected, _ = reference(q, *of_sequences, batch, 0.25)
    for arithmetic in ["f32", "bf16"] if dtype == "bf16" and bf16_arithmetic() else ["f32"]:
        out, lse = _core.paged_attention(
            q, kv, *batch.lists, sm_scale=0.25, arithmetic=arithmetic, return_lse=True
        )
        assert np.isfinite(lse).all()
        np.testing.assert_allclose(out, expected, rtol=2.0**-7, atol=1e-4)


def test_a_nan_stays_in_its_sequence(isa):
    rng = np.random.default_rng(6)
    batch = make_batch(rng, [70, 90], [1, 1])
    kv, _, _ = fill(rng, batch, 1, 16, "f32")
    q = rng.standard_normal((2, 2, 16), np.float32)
    q[0, 0, 3] = np.nan
    out = _core.paged_attention(q, kv, *batch.lists)
    assert np.isnan(out[0, 0]).all()
    assert np.isfinite(out[0, 1]).all()
    assert np.isfinite(out[1]).all()


def i32(*values):
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": np.zeros((2, 3, 16), np.float32)}, r"q: expected shape \[T, a multiple of 2, 16\]"),
        ({"q": np.zeros((2, 2, 8), np.float32)}, "q: expected shape"),
        ({"q": np.zeros((2, 2, 16), np.float16)}, "q: expected dtype f32, got f16"),
        ({"q": np.zeros((2, 32), np.float32)}, "q: expected 3 dimensions"),
        ({"q": np.zeros((2, 16, 2), np.float32).transpose(0, 2, 1)}, "q: expected a C-contiguous"),
        ({"qo_indptr": i32(0, 3, 2)}, "qo_indptr: expected values that never decrease"),
        ({"qo_indptr": i32(0, 1, 3)}, "qo_indptr: expected 2 last"),
        ({"qo_indptr": i32(1, 1, 2)}, "qo_indptr: expected 0 first"),
        ({"qo_indptr": i32(0, 2)}, r"qo_indptr: expected shape \[3\]"),
        ({"qo_indptr": np.array([0, 1, 2])}, "qo_indptr: expected dtype i32, got i64"),
        ({"kv_indptr": i32(0, 1, 9)}, "kv_indptr: expected at most 3"),
        ({"kv_indices": i32(0, 1, 4)}, r"kv_indices\[2\]: expected a value in \[0, 4\), got 4"),
        ({"kv_indices": i32(0, -1, 3)}, r"kv_indices\[1\]"),
        ({"kv_len": i32(65, 10)}, r"kv_len\[0\]: expected .* 64 tokens of its pages, got 65"),
        ({"kv_len": i32(10, 0)}, r"kv_len\[1\]: expected at least its 1 query rows"),
        ({"sm_scale": float("nan")}, "sm_scale: expected a finite number"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap: expected a number >= 0"),
        ({"window_left": -2}, "window_left: expected -1 or more"),
        ({"sink_tokens": -1}, "sink_tokens: expected 0 or more"),
        ({"arithmetic": "f16"}, "arithmetic: expected f32 or bf16, got f16"),
        ({"parents": i32(-1)}, r"parents: expected shape \[2\]"),
        ({"parents": np.zeros(2, np.int64)}, "parents: expected dtype i32"),
        ({"parents": i32(-1, 0)}, r"parents\[1\]: expected -1 to -1, got 0"),
        ({"parents": i32(-2, -1)}, r"parents\[0\]: expected -1 to -1, got -2"),
    ],
)
def test_errors(changes, message):
    arguments = {
        "q": np.zeros((2, 2, 16), np.float32),
        "kv": _core.PagedKv(4, 2, 16),
        "qo_indptr": i32(0, 1, 2),
        "kv_indptr": i32(0, 1, 3),
        "kv_indices": i32(0, 1, 2),
        "kv_len": i32(10, 100),
    } | changes
    with pytest.raises(_core.InvalidArgumentError, match=r"^\[paged_attention\] .*" + message):
        _core.paged_attention(**arguments)


def test_bf16_arithmetic_where_there_is_none(isa):
    kv = _core.PagedKv(1, 1, 16, "bf16" if not bf16_arithmetic() else "f32")
    with pytest.raises(_core.UnsupportedError, match=r"\[attention\].*arithmetic=bf16"):
        _core.paged_attention(
            np.zeros((1, 2, 16), np.float32), kv, i32(0, 1), i32(0, 1), i32(0), i32(1),
            arithmetic="bf16",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 16), "num_pages: expected a positive number, got 0"),
        ((1, 0, 16), "num_kv_heads"),
        ((1, 1, 24), "head_dim: expected a multiple of 16 up to 256, got 24"),
        ((1, 1, 272), "head_dim"),
        ((1, 1, 16, "q4_0"), "dtype: expected f32, f16, bf16 or i8, got q4_0"),
    ],
)
def test_pool_errors(arguments, message):
    with pytest.raises(_core.InvalidArgumentError, match=r"^\[paged_kv\] " + message):
        _core.PagedKv(*arguments)

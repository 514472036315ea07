"""Merging attention states, and cascades, against attention over all keys at once."""

import numpy as np
import pytest
import torch

from effinfer import InvalidArgumentError, ops
from tests.ops.batches import Paged, Shape, as_dtype, as_torch, offsets, values_of
from tests.ops.reference import Expected, assert_attention, attend, join, seen
from tests.ops.test_decode import bf16_products

DTYPES = ["float32", "float16", "bfloat16"]


def merged(v, s, base):
    """Of v [T, S, H, D] and s [T, S, H] in float64, by the definition."""
    natural = s * (np.log(2.0) if base == "log2" else 1.0)
    weights = np.exp(natural)
    total = weights.sum(1)
    p = weights / total[:, None]
    return Expected(
        np.einsum("tsh,tshd->thd", p, v),
        np.log(total),
        np.einsum("tsh,tshd->thd", p, np.abs(v)),
        np.abs(natural).max(1),
        s.shape[1],
    )


def random_states(rng, tokens, states, heads, head_dim, dtype):
    v = as_dtype(rng.standard_normal((tokens, states, heads, head_dim), np.float32), dtype)
    s = rng.standard_normal((tokens, states, heads), np.float32) * 8
    return v, s


@pytest.mark.parametrize("base", ["log2", "ln"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "states", "heads", "head_dim"),
    [(1, 1, 1, 16), (5, 2, 3, 64), (7, 9, 2, 80), (3, 100, 4, 24), (0, 2, 2, 64), (300, 3, 8, 128)],
)
def test_merge_states(isa, base, dtype, tokens, states, heads, head_dim):
    rng = np.random.default_rng(states)
    v, s = random_states(rng, tokens, states, heads, head_dim, dtype)
    got_v, got_s = ops.merge_states(v, s, lse_base=base)
    assert got_v.dtype == v.dtype
    expected = merged(values_of(v, dtype), s.astype(np.float64), base)
    options = {"dtype": dtype, "lse_base": base}
    assert_attention(values_of(got_v, dtype), got_s, expected, **options)
    if states == 2:
        pair = ops.merge_state(v[:, 0], s[:, 0], v[:, 1], s[:, 1], lse_base=base)
        np.testing.assert_array_equal(pair[0], got_v)
        np.testing.assert_array_equal(pair[1], got_s)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_state_is_itself(isa, dtype):
    v, s = random_states(np.random.default_rng(1), 9, 1, 2, 40, dtype)
    got_v, got_s = ops.merge_states(v, s)
    np.testing.assert_array_equal(got_v, v[:, 0])
    np.testing.assert_array_equal(got_s, s[:, 0])


def test_states_without_keys(isa):
    rng = np.random.default_rng(2)
    v, s = random_states(rng, 3, 2, 2, 20, "float32")
    s[0, 0] = s[1] = -np.inf
    v[0, 0] = np.nan
    v[1] = np.nan
    got_v, got_s = ops.merge_states(v, s)
    np.testing.assert_array_equal(got_v[0], v[0, 1])
    np.testing.assert_array_equal(got_s[0], s[0, 1])
    np.testing.assert_array_equal(got_v[1], 0)
    assert np.isneginf(got_s[1]).all()
    assert np.isfinite(got_v[2]).all()


def test_nan_sums_stay_in_their_row(isa):
    v, s = random_states(np.random.default_rng(3), 2, 3, 2, 16, "float32")
    s[0, 1, 0] = np.nan
    got_v, got_s = ops.merge_states(v, s)
    assert np.isnan(got_v[0, 0]).all()
    assert np.isnan(got_s[0, 0])
    assert np.isfinite(got_v[0, 1]).all()
    assert np.isfinite(got_v[1]).all()


def test_large_sums_do_not_overflow(isa):
    v, s = random_states(np.random.default_rng(4), 4, 2, 1, 16, "float32")
    s += np.array([3e4, 3e4], np.float32)[None, :, None]
    got_v, got_s = ops.merge_states(v, s)
    assert np.isfinite(got_v).all()
    assert (got_s >= 3e4 - 100).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place(isa, dtype):
    v, s = random_states(np.random.default_rng(5), 6, 2, 3, 72, dtype)
    expected = ops.merge_states(v, s)
    target, sums = v[:, 0].copy(), s[:, 0].copy()
    ops.merge_state_in_place(target, sums, v[:, 1], s[:, 1])
    np.testing.assert_array_equal(target, expected[0])
    np.testing.assert_array_equal(sums, expected[1])
    mask = np.array([True, False, True, True, False, False])
    target, sums = v[:, 0].copy(), s[:, 0].copy()
    ops.merge_state_in_place(target, sums, v[:, 1], s[:, 1], mask)
    np.testing.assert_array_equal(target[mask], expected[0][mask])
    np.testing.assert_array_equal(sums[mask], expected[1][mask])
    np.testing.assert_array_equal(target[~mask], v[~mask, 0])
    np.testing.assert_array_equal(sums[~mask], s[~mask, 0])


def test_torch_tensors_give_torch_tensors():
    v, s = random_states(np.random.default_rng(6), 3, 2, 2, 32, "bfloat16")
    expected_v, expected_s = ops.merge_states(v, s)
    tensor_v, tensor_s = ops.merge_states(as_torch(v, "bfloat16"), torch.from_numpy(s))
    assert tensor_v.dtype == torch.bfloat16
    np.testing.assert_array_equal(tensor_v.view(torch.int16).numpy(), expected_v.view(np.int16))
    np.testing.assert_array_equal(tensor_s.numpy(), expected_s)


F32 = np.float32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.zeros((2, 3, 4), F32),) * 2, "v: expected 4 dimensions"),
        ((np.zeros((2, 3, 1, 4), F32), np.zeros((2, 1, 3), F32)), r"s: expected shape \[2, 3, 1\]"),
        ((np.zeros((2, 3, 1, 4), F32), np.zeros((2, 3, 1))), "s: expected"),
        (
            (np.zeros((2, 3, 1, 4), np.int32), np.zeros((2, 3, 1), F32)),
            "v: expected dtype f32, f16",
        ),
        ((np.zeros((2, 3, 1, 4), F32), None), "s: expected a numpy array"),
    ],
)
def test_errors(arguments, message):
    with pytest.raises(InvalidArgumentError, match=r"^\[merge_states\] " + message):
        ops.merge_states(*arguments)


def test_errors_of_two_states():
    v, s = np.zeros((2, 3, 4), F32), np.zeros((2, 3), F32)
    with pytest.raises(InvalidArgumentError, match=r"v_b: expected shape \[2, 3, 4\]"):
        ops.merge_state(v, s, v[:1], s)
    with pytest.raises(InvalidArgumentError, match="v_b: expected dtype f32, got f16"):
        ops.merge_state(v, s, v.astype(np.float16), s)
    with pytest.raises(InvalidArgumentError, match="lse_base: expected log2 or ln, got log10"):
        ops.merge_state(v, s, v, s, lse_base="log10")
    with pytest.raises(InvalidArgumentError, match=r"mask: expected shape \[2\]"):
        ops.merge_state_in_place(v, s, v.copy(), s.copy(), np.zeros(3, bool))
    with pytest.raises(InvalidArgumentError, match=r"v_other: expected shape \[2, 3, 4\]"):
        ops.merge_state_in_place(v, s, v[:1], s[:1])
    frozen = v.copy()
    frozen.flags.writeable = False
    with pytest.raises(InvalidArgumentError, match="expected a writable array"):
        ops.merge_state_in_place(frozen, s, v, s)


def concatenated(batch, groups):
    """The keys and values of each sequence: those of its parts, one after the other."""
    keys = [np.concatenate([batch.keys[part] for part in parts]) for parts in groups]
    values = [np.concatenate([batch.values[part] for part in parts]) for parts in groups]
    return keys, values


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
def test_cascade(isa, layout, dtype, causal):
    """A prefix of all, one of each half, and the sequences' own keys."""
    rng = np.random.default_rng(7)
    rows = [3, 1, 2, 5]
    # Parts 0: of all; 1, 2: of the halves; 3 to 6: of the sequences.
    parts = [[0], [1, 2], [3, 4, 5, 6]]
    groups = [(0, 1, 3), (0, 1, 4), (0, 2, 5), (0, 2, 6)]
    batch = Paged(rng, [200, 33, 0, 5, 3, 70, 6], 16, Shape(4, 2, 64), dtype, layout)
    q = batch.queries(rows, dtype)
    lists = [[], [], []]
    for level in parts:
        pages = [batch.kv_indices[batch.kv_indptr[p] : batch.kv_indptr[p + 1]] for p in level]
        lists[0].append(offsets([len(page) for page in pages]))
        lists[1].append(np.concatenate(pages))
        lists[2].append(batch.last_page_len[level])
    qo_indptr = [offsets([11]), offsets([4, 7]), offsets(rows)]
    wrapper = ops.MultiLevelCascadeAttentionWrapper(3, None, layout)
    wrapper.plan(qo_indptr, *lists, 4, 2, 64, 16, causal=causal)
    out, lse = wrapper.run(q, batch.cache, return_lse=True, lse_base="ln")
    keys, values = concatenated(batch, groups)
    starts, exact = offsets(rows), values_of(q, dtype)
    expected = join(
        [
            attend(exact[starts[s] : starts[s + 1]], k, v, seen(rows[s], len(k), causal))
            for s, (k, v) in enumerate(zip(keys, values, strict=True))
        ]
    )
    options = {"bf16_products": bf16_products(dtype, dtype), "roundings": 5}
    assert_attention(values_of(out, dtype), lse, expected, dtype=dtype, lse_base="ln", **options)
    target = np.empty_like(out)
    assert wrapper.run(q, batch.cache, out=target, lse_base="ln") is target
    np.testing.assert_array_equal(target, out)


def test_errors_of_cascades():
    wrapper = ops.MultiLevelCascadeAttentionWrapper(2)
    with pytest.raises(InvalidArgumentError, match=r"expected plan\(\) before run\(\)"):
        wrapper.run(None, None)
    one = np.array([0, 1], np.int32)
    lists = [[one] * 2, [one] * 2, [one[:1]] * 2, [one[1:]] * 2]
    heads = 2, 1, 64, 16
    wrapper.plan(*lists, *heads)
    with pytest.raises(InvalidArgumentError, match="qo_indptr_arr: expected as many rows"):
        wrapper.plan([one, one * 2], *lists[1:], *heads)
    with pytest.raises(InvalidArgumentError, match="paged_kv_last_page_len: expected 2 levels"):
        wrapper.plan(*lists[:3], [one[1:]], *heads)
    with pytest.raises(InvalidArgumentError, match="window_left: expected -1"):
        wrapper.plan(*lists, *heads, window_left=5)
    with pytest.raises(InvalidArgumentError, match="num_levels: expected a positive number"):
        ops.MultiLevelCascadeAttentionWrapper(0)

"""Appending to pages, and the lists that say where, against loops."""

import numpy as np
import pytest
import torch

from effinfer import InvalidArgumentError, ops
from tests.ops.batches import as_dtype, as_torch, offsets, values_of


def i32(*values):
    return np.array(values, np.int32)


def make_lists(rng, lengths, page_size, num_pages):
    """(kv_indices, kv_indptr, kv_last_page_len) of scattered pages."""
    counts = [-(-n // page_size) for n in lengths]
    indices = rng.permutation(num_pages)[: sum(counts)].astype(np.int32)
    last = [n - (c - 1) * page_size if c else 0 for n, c in zip(lengths, counts, strict=True)]
    return indices, offsets(counts), i32(*last)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("one_array", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
def test_append(layout, one_array, dtype):
    rng = np.random.default_rng(0)
    lengths, appended, page_size, heads, dim = [1, 0, 37, 64, 3000], [1, 0, 5, 64, 1203], 16, 3, 24
    lists = make_lists(rng, lengths, page_size, 230)
    k, v = as_dtype(rng.standard_normal((2, sum(appended), heads, dim), np.float32), dtype)
    shape = (page_size, heads, dim) if layout == "NHD" else (heads, page_size, dim)
    cache = np.zeros((230, 2, *shape), k.dtype)
    places = ops.get_batch_indices_positions(offsets(appended), i32(*lengths), sum(appended))
    expected = cache.copy()
    row = 0
    for s, (length, count) in enumerate(zip(lengths, appended, strict=True)):
        for position in range(length - count, length):
            page = lists[0][lists[1][s] + position // page_size]
            slot = position % page_size
            at = (slot, slice(None)) if layout == "NHD" else (slice(None), slot)
            expected[(page, 0, *at)] = k[row]
            expected[(page, 1, *at)] = v[row]
            row += 1
    target = cache if one_array else (cache[:, 0], cache[:, 1])
    ops.append_paged_kv_cache(k, v, *places, target, *lists, layout)
    np.testing.assert_array_equal(cache, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_append_rounds_floats(dtype):
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((2, 5, 2, 33), np.float32)
    cache = as_dtype(np.zeros((2, 2, 4, 2, 33), np.float32), dtype)
    lists = i32(1, 0), i32(0, 2), i32(1)
    ops.append_paged_kv_cache(k, v, i32(0, 0, 0, 0, 0), i32(0, 1, 2, 3, 4), cache, *lists)
    got = values_of(cache, dtype)
    for part, rows in enumerate((k, v)):
        expected = values_of(as_dtype(rows, dtype), dtype)
        np.testing.assert_array_equal(got[1, part], expected[:4])
        np.testing.assert_array_equal(got[0, part, 0], expected[4])


def test_append_of_strided_tensors():
    rng = np.random.default_rng(2)
    qkv = torch.from_numpy(rng.standard_normal((6, 3, 2, 16), np.float32)).to(torch.bfloat16)
    cache = torch.zeros((3, 2, 2, 2, 16), dtype=torch.bfloat16)
    lists = i32(2, 0, 1), i32(0, 3), i32(2)
    places = ops.get_batch_indices_positions(i32(0, 6), i32(6), 6)
    ops.append_paged_kv_cache(qkv[:, 1], qkv[:, 2], *places, cache, *lists, "HND")
    for position in range(6):
        page, slot = [2, 0, 1][position // 2], position % 2
        assert torch.equal(cache[page, 0, :, slot], qkv[position, 1])
        assert torch.equal(cache[page, 1, :, slot], qkv[position, 2])


def test_append_of_latent_pages():
    rng = np.random.default_rng(3)
    ckv, kpe = (as_torch(rng.standard_normal((5, n), np.float32), "float32") for n in (32, 8))
    pages = [torch.zeros((2, 4, n)) for n in (32, 8)]
    places = ops.get_batch_indices_positions(i32(0, 2, 5), i32(2, 3), 5)
    ops.append_paged_mla_kv_cache(ckv, kpe, *places, *pages, i32(1, 0), i32(0, 1, 2), i32(2, 3))
    for rows, cache in zip((ckv, kpe), pages, strict=True):
        assert torch.equal(cache[1, :2], rows[:2])
        assert torch.equal(cache[0, :3], rows[2:])
        assert not cache[1, 2:].any()
    with pytest.raises(InvalidArgumentError, match=r"^\[append_paged_mla_kv_cache\] append_kpe: "):
        lists = i32(1, 0), i32(0, 1, 2), i32(2, 3)
        ops.append_paged_mla_kv_cache(ckv, ckv, *places, *pages, *lists)


def test_places():
    batch, positions = ops.get_batch_indices_positions(
        torch.tensor([0, 1, 3, 3, 6], dtype=torch.int32), torch.tensor([5, 5, 0, 3]), 6
    )
    assert batch.dtype == torch.int32
    assert batch.tolist() == [0, 1, 1, 3, 3, 3]
    assert positions.tolist() == [4, 3, 4, 0, 1, 2]
    lengths = ops.get_seq_lens(i32(0, 3, 3, 4), i32(2, 0, 16), 16)
    np.testing.assert_array_equal(lengths, [34, 0, 16])
    assert lengths.dtype == np.int32


APPEND = {
    "append_key": np.zeros((2, 2, 8), np.float32),
    "append_value": np.zeros((2, 2, 8), np.float32),
    "batch_indices": i32(0, 1),
    "positions": i32(0, 4),
    "paged_kv_cache": np.zeros((3, 2, 4, 2, 8), np.float32),
    "kv_indices": i32(0, 1, 2),
    "kv_indptr": i32(0, 1, 3),
    "kv_last_page_len": i32(4, 1),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"append_key": np.zeros((2, 3, 8), np.float32)},
            r"append_key: expected shape \[2, 2, 8\]",
        ),
        ({"append_value": np.zeros((1, 2, 8), np.float32)}, "append_value: expected 2 rows, got 1"),
        ({"append_key": np.zeros((2, 2, 8), np.int8)}, "append_key: expected dtype f32 of k_cache"),
        ({"append_key": np.zeros(3, np.float32)}, "append_key: expected rows"),
        ({"batch_indices": i32(0, 2)}, r"batch_indices\[1\]: expected 0 to 1, got 2"),
        ({"batch_indices": i32(0, -1)}, r"batch_indices\[1\]: expected"),
        ({"batch_indices": i32(0)}, r"batch_indices: expected shape \[2\]"),
        ({"batch_indices": np.zeros(2)}, "batch_indices: expected int32 or int64, got float64"),
        ({"positions": i32(0, 5)}, r"positions\[1\]: expected 0 to 4, got 5"),
        ({"positions": i32(-1, 0)}, r"positions\[0\]: expected"),
        ({"kv_indices": i32(0, 1, 3)}, r"kv_indices\[2\]: expected a value in \[0, 3\), got 3"),
        ({"kv_indptr": i32(0, 2, 1)}, "kv_indptr: expected values that never decrease"),
        ({"kv_indptr": i32(1, 2, 3)}, "kv_indptr: expected 0 first, got 1"),
        ({"kv_indptr": i32(0, 1, 4)}, "kv_indptr: expected at most 3"),
        ({"kv_indptr": np.zeros(0, np.int32)}, "kv_indptr: expected at least one value"),
        ({"kv_last_page_len": i32(4, 0)}, r"kv_last_page_len\[1\]: expected 1 to 4, got 0"),
        ({"kv_last_page_len": i32(5, 1)}, r"kv_last_page_len\[0\]: expected 1 to 4, got 5"),
        ({"kv_last_page_len": i32(4)}, r"kv_last_page_len: expected shape \[2\]"),
        (
            {"paged_kv_cache": np.zeros((3, 4, 2, 8), np.float32)},
            r"paged_kv_cache: expected \(k, v\)",
        ),
        ({"paged_kv_cache": (np.zeros((3, 4, 2, 8)),) * 3}, "paged_kv_cache: expected"),
        (
            {"paged_kv_cache": (np.zeros((3, 4, 2, 8), np.float32)[..., ::2],) * 2},
            "shape|contiguous",
        ),
        ({"kv_layout": "NDH"}, "kv_layout: expected NHD or HND, got NDH"),
    ],
)
def test_errors(changes, message):
    with pytest.raises(InvalidArgumentError, match=r"^\[append_paged_kv_cache\] .*" + message):
        ops.append_paged_kv_cache(**(APPEND | changes))


def test_a_read_only_cache():
    cache = np.zeros((3, 2, 4, 2, 8), np.float32)
    cache.flags.writeable = False
    with pytest.raises(InvalidArgumentError, match="k_cache: expected a writable array"):
        ops.append_paged_kv_cache(**(APPEND | {"paged_kv_cache": cache}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((i32(0, 2), i32(1), 2), "seq_lens: expected"),
        ((i32(0, 2), i32(3), 1), "nnz: expected 2, the last"),
        ((i32(0, 2, 1), i32(3, 3), 1), "append_indptr: expected values that never decrease"),
    ],
)
def test_errors_of_places(arguments, message):
    with pytest.raises(InvalidArgumentError, match=message):
        ops.get_batch_indices_positions(*arguments)


def test_random_lists_never_crash():
    rng = np.random.default_rng(4)
    written = 0
    for _ in range(300):
        count = int(rng.integers(1, 4))
        arguments = APPEND | {
            "paged_kv_cache": np.zeros((3, 2, 4, 2, 8), np.float32),
            "batch_indices": rng.integers(0, count, 2).astype(np.int32),
            "positions": rng.integers(0, 6, 2).astype(np.int32),
            "kv_indices": rng.integers(0, 4, 3).astype(np.int32),
            "kv_indptr": np.sort(rng.integers(0, 4, count + 1) * rng.integers(0, 2)).astype(
                np.int32
            ),
            "kv_last_page_len": rng.integers(0, 6, count).astype(np.int32),
            "append_key": np.ones((2, 2, 8), np.float32),
        }
        arguments["kv_indptr"][0] = 0
        try:
            ops.append_paged_kv_cache(**arguments)
        except InvalidArgumentError:
            assert not arguments["paged_kv_cache"].any()
        else:
            assert arguments["paged_kv_cache"][:, 0].sum() in (16.0, 32.0)
            written += 1
    assert written > 5

"""Random lists through the wrappers: a typed error, or the attention that the lists describe."""

import numpy as np

from effinfer import InvalidArgumentError, ops
from tests.ops.batches import offsets
from tests.ops.reference import assert_attention, attend, join, seen

PAGE, PAGES, HEADS, KV_HEADS, DIM = 4, 6, 4, 2, 16
ROUNDS = 80


def random_indptr(rng, count, most):
    """Mostly offsets; at times decreasing ones or ones that start elsewhere."""
    steps = rng.integers(-1 if rng.random() < 0.1 else 0, most + 1, count)
    start = int(rng.random() < 0.05)
    return np.cumsum([start, *steps]).astype(np.int32)


def random_pages(rng, count):
    """(indptr, indices, last_page_len), one in a few wrong."""
    indptr = random_indptr(rng, count, 3)
    size = max(int(indptr[-1]), 0) + int(rng.integers(-1, 3) if rng.random() < 0.2 else 0)
    low, high = (-1, PAGES + 1) if rng.random() < 0.1 else (0, PAGES)
    indices = rng.integers(low, high, max(size, 0)).astype(np.int32)
    low, high = (0, PAGE + 2) if rng.random() < 0.1 else (1, PAGE + 1)
    return indptr, indices, rng.integers(low, high, count).astype(np.int32)


def lengths_of(lists):
    pages = np.diff(lists[0])
    return np.where(pages > 0, (pages - 1) * PAGE + lists[2], 0).clip(0).astype(np.int32)


def tokens_of(cache, lists, s):
    """Keys and values [m, KV_HEADS, DIM] of sequence s."""
    indptr, indices, last = lists
    pages = cache[indices[indptr[s] : indptr[s + 1]]]
    flat = pages.swapaxes(1, 2).reshape(-1, 2, KV_HEADS, DIM)
    return flat[: len(flat) - PAGE + last[s]] if len(flat) else flat


def works(attempt, rng):
    """Whether attempt(rng) finds its result right; False where the lists are refused."""
    try:
        attempt(rng)
    except InvalidArgumentError as error:
        assert ": expected " in str(error)
        return False
    return True


def run_many(rng, attempt, least):
    """Both must happen: results, and lists that are refused."""
    worked = sum(works(attempt, rng) for _ in range(ROUNDS))
    assert least <= worked < ROUNDS


def test_paged_prefill(isa):
    rng = np.random.default_rng(0)
    cache = rng.standard_normal((PAGES, 2, PAGE, KV_HEADS, DIM), np.float32)

    def attempt(rng):
        count = int(rng.integers(0, 4))
        lists, rows = random_pages(rng, count), random_indptr(rng, count, 5)
        q = rng.standard_normal((max(int(rows[-1]), 0), HEADS, DIM), np.float32)
        causal, window = bool(rng.integers(2)), int(rng.integers(-1, 6))
        wrapper = ops.BatchPrefillWithPagedKVCacheWrapper()
        heads = HEADS, KV_HEADS, DIM, PAGE
        wrapper.plan(rows, *lists, *heads, causal=causal, window_left=window)
        out, lse = wrapper.run(q, cache, return_lse=True)
        for s in range(count):
            tokens = tokens_of(cache, lists, s)
            mine = slice(rows[s], rows[s + 1])
            mask = seen(rows[s + 1] - rows[s], len(tokens), causal, window)
            expected = attend(q[mine], tokens[:, 0], tokens[:, 1], mask)
            assert_attention(out[mine], lse[mine], expected)

    run_many(rng, attempt, 20)


def test_masked_prefill(isa):
    rng = np.random.default_rng(1)
    cache = rng.standard_normal((PAGES, 2, PAGE, KV_HEADS, DIM), np.float32)

    def attempt(rng):
        lists, rows = random_pages(rng, 2), random_indptr(rng, 2, 5)
        wrong = int(rng.random() < 0.2)
        lengths = lengths_of(lists)
        counts = np.maximum(np.diff(rows), 0)
        masks = [rng.random((n, m)) < 0.5 for n, m in zip(counts, lengths, strict=True)]
        flat = np.concatenate([mask.reshape(-1) for mask in masks] + [np.ones(wrong, bool)])
        q = rng.standard_normal((max(int(rows[-1]), 0), HEADS, DIM), np.float32)
        wrapper = ops.BatchPrefillWithPagedKVCacheWrapper()
        wrapper.plan(rows, *lists, HEADS, KV_HEADS, DIM, PAGE, custom_mask=flat)
        out, lse = wrapper.run(q, cache, return_lse=True)
        parts = []
        for s in range(2):
            tokens = tokens_of(cache, lists, s)
            parts.append(attend(q[rows[s] : rows[s + 1]], tokens[:, 0], tokens[:, 1], masks[s]))
        assert_attention(out, lse, join(parts))

    run_many(rng, attempt, 15)


def test_latent_attention(isa):
    rng = np.random.default_rng(2)
    ckv, kpe = (rng.standard_normal((PAGES, PAGE, dim), np.float32) for dim in (32, 16))

    def attempt(rng):
        count = int(rng.integers(1, 4))
        lists = random_pages(rng, count)
        indptr, indices, _ = lists
        lengths = lengths_of(lists)
        rows = random_indptr(rng, count, 3)
        total = max(int(rows[-1]), 0)
        q_nope, q_pe = (rng.standard_normal((total, 3, dim), np.float32) for dim in (32, 16))
        wrapper = ops.BatchMLAPagedAttentionWrapper()
        wrapper.plan(rows, indptr, indices, lengths, 3, 32, 16, PAGE, sm_scale=0.2)
        out, lse = wrapper.run(q_nope, q_pe, ckv, kpe, return_lse=True)
        q = np.concatenate([q_nope, q_pe], -1)
        for s in range(count):
            pages = indices[indptr[s] : indptr[s + 1]]
            values = ckv[pages].reshape(-1, 1, 32)[: lengths[s]]
            keys = np.concatenate([values, kpe[pages].reshape(-1, 1, 16)[: lengths[s]]], -1)
            mine = slice(rows[s], rows[s + 1])
            mask = seen(rows[s + 1] - rows[s], lengths[s])
            expected = attend(q[mine], keys, values, mask, sm_scale=0.2)
            assert_attention(out[mine], lse[mine], expected)

    run_many(rng, attempt, 15)


def test_variable_blocks(isa):
    rng = np.random.default_rng(3)

    def attempt(rng):
        blocks = rng.integers(1, 5, 2)
        sizes = [
            np.stack(
                [rng.permutation(rng.multinomial(20, np.ones(n) / n)) for _ in range(KV_HEADS)]
            )
            for n in blocks
        ]
        if rng.random() < 0.3:
            sizes[int(rng.integers(2))][0, 0] += int(rng.integers(-2, 3))
        block_map = rng.random((KV_HEADS, *blocks)) < 0.5
        q = rng.standard_normal((HEADS, 20, DIM), np.float32)
        k, v = rng.standard_normal((2, KV_HEADS, 20, DIM), np.float32)
        wrapper = ops.VariableBlockSparseAttentionWrapper()
        wrapper.plan(block_map, *sizes, HEADS, KV_HEADS, DIM)
        out, lse = wrapper.run(q, k, v, return_lse=True)
        masks = [
            np.repeat(np.repeat(block_map[h], sizes[1][h], 1), sizes[0][h], 0)
            for h in range(KV_HEADS)
        ]
        mask = np.repeat(np.stack(masks), HEADS // KV_HEADS, 0)
        expected = attend(*(x.swapaxes(0, 1) for x in (q, k, v)), mask)
        assert_attention(out.swapaxes(0, 1), lse.T, expected)

    run_many(rng, attempt, 30)


def test_trees(isa):
    rng = np.random.default_rng(4)
    cache = rng.standard_normal((PAGES, 2, PAGE, KV_HEADS, DIM), np.float32)

    def attempt(rng):
        lists, rows = random_pages(rng, 2), random_indptr(rng, 2, 4)
        total = max(int(rows[-1]), 0)
        parents = rng.integers(-1, 2, total).astype(np.int32)
        q = rng.standard_normal((total, HEADS, DIM), np.float32)
        out, lse = ops.tree_attention(q, cache, parents, rows, *lists, return_lse=True)
        for s in range(2):
            tokens = tokens_of(cache, lists, s)
            tree = parents[rows[s] : rows[s + 1]]
            mask = np.zeros((len(tree), len(tokens)), bool)
            mask[:, : len(tokens) - len(tree)] = True
            for i in range(len(tree)):
                row = i
                while row >= 0:
                    mask[i, len(tokens) - len(tree) + row] = True
                    row = tree[row]
            mine = slice(rows[s], rows[s + 1])
            expected = attend(q[mine], tokens[:, 0], tokens[:, 1], mask)
            assert_attention(out[mine], lse[mine], expected)

    run_many(rng, attempt, 5)


def test_cascades(isa):
    rng = np.random.default_rng(5)
    cache = rng.standard_normal((PAGES, 2, PAGE, KV_HEADS, DIM), np.float32)

    def attempt(rng):
        count = int(rng.integers(1, 4))
        shared, own = random_pages(rng, 1), random_pages(rng, count)
        rows = random_indptr(rng, count, 3)
        total = max(int(rows[-1]), 0)
        q = rng.standard_normal((total, HEADS, DIM), np.float32)
        wrapper = ops.MultiLevelCascadeAttentionWrapper(2)
        levels = [offsets([total]), rows], *zip(shared, own, strict=True)
        wrapper.plan(*levels, HEADS, KV_HEADS, DIM, PAGE)
        out, lse = wrapper.run(q, cache, return_lse=True)
        for s in range(count):
            tokens = np.concatenate([tokens_of(cache, shared, 0), tokens_of(cache, own, s)])
            mine = slice(rows[s], rows[s + 1])
            mask = seen(rows[s + 1] - rows[s], len(tokens))
            expected = attend(q[mine], tokens[:, 0], tokens[:, 1], mask)
            assert_attention(out[mine], lse[mine], expected, roundings=2)

    run_many(rng, attempt, 15)

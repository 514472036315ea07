"""Pages that the query heads of a KV head choose together for blocks of rows, by the mean of their
queries or by a probe query, against float64."""

import numpy as np
import pytest

from effinfer import _core
from tests.ops.attention_reference import Batch, fill, make_batch
from tests.ops.test_visits import (
    KV_LENS,
    QO_LENS,
    Bounds,
    Rounding,
    arithmetics,
    check_lists,
    top,
)


def probe_query(q: np.ndarray) -> np.ndarray:
    """float64 [group, dim] of the rows q [rows, group, dim] of a KV head."""
    rows = q.reshape(len(q), -1).astype(np.float64)
    variances = rows.var(0)
    alike = variances == 0
    biases = (rows - rows.mean(0)) ** 2 / np.where(alike, np.inf, variances)
    weights = biases.sum(1) if not alike.all() else np.ones(len(q))
    return (weights @ rows / weights.sum()).reshape(q.shape[1:])


def budget_bounds(q, keys, batch, options, rounded: Rounding, sink_tokens: int, local_tokens: int):
    """choose() of check_lists for block_visits with a budget and no stride: by the sum of
    the heads' shares of the pages that are chosen from."""

    def choose(sequence: int, kv_head: int, block) -> Bounds:
        group = q.shape[1] // keys[sequence].shape[1]
        heads = slice(kv_head * group, (kv_head + 1) * group)
        rows = q[block[1] : block[1] + block[2], heads]
        mean = probe_query(rows) if options.get("queries") == "probe" else rows.mean(0)
        first, local = sink_tokens // 64, max(0, block[3] + 1 - max(local_tokens, 1))
        count = max(0, -(-local // 64) - first)
        share = int(np.ceil(np.float32(options.get("share", 0.0)) * np.float32(count)))
        wanted = max(options.get("keys", 0) // 64, share)
        length = int(batch.kv_len[sequence])
        bounds = np.zeros((2, length), bool)
        if wanted >= count:
            return ~bounds[0], ~bounds[1]
        scale = np.float32(q.shape[2] ** -0.5)
        scores = np.zeros(count)
        for head in range(group):
            asked = rounded((mean[head] * scale).astype(np.float32)).astype(np.float64)
            k = keys[sequence][first * 64 :, kv_head].astype(np.float64)
            k = k[: block[3] + block[2] - first * 64]
            logits = [(k[64 * i :][:64] @ asked).mean() for i in range(count)]
            p = np.exp(np.array(logits) - max(logits))
            scores += p / p.sum()
        pages = slice(first * 64, (first + count) * 64)
        for i, some in enumerate(top(scores, wanted, 0.0)):
            bounds[i, pages] = np.repeat(some, 64)[: length - first * 64]
        return bounds[0], bounds[1]

    return choose


@pytest.mark.parametrize(
    ("sinks", "local", "options"),
    [
        (64, 65, {"queries": "probe", "keys": 192}),
        (3, 0, {"queries": "probe", "keys": 100, "share": 0.3}),
        (130, 200, {"queries": "probe", "share": 0.5}),
        (64, 65, {"keys": 256}),
        (0, 1, {"queries": "probe", "keys": 1 << 30}),
    ],
)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "i8"])
def test_a_budget_of_heads_that_choose_together(isa, dtype, sinks, local, options):
    rng = np.random.default_rng(sinks)
    batch = make_batch(rng, KV_LENS, QO_LENS)
    kv, keys, _ = fill(rng, batch, 2, 32, dtype)
    # Few tokens lie far from the others, whose queries are much alike.
    q = rng.standard_normal((sum(QO_LENS), 6, 32), np.float32)
    q[rng.random(len(q)) < 0.1] *= 12
    q += 4 * rng.standard_normal((1, 6, 32), np.float32)
    for arithmetic, rounded in arithmetics(dtype):
        visits = _core.Visits(batch.qo_indptr, batch.kv_len, 6, 2)
        _core.block_visits(
            visits,
            q,
            kv,
            *batch.lists,
            sink_tokens=sinks,
            local_tokens=local,
            arithmetic=arithmetic,
            **options,
        )
        choose = budget_bounds(q, keys, batch, options, rounded, sinks, local)
        check_lists(visits, batch, choose, sinks, local)


def test_a_probe_query_is_of_tokens_that_differ(isa):
    """One row of 64 asks for another page than the others: the probe does as it does, their mean as
    the others do. The probe of rows that are all alike is their mean."""
    rng = np.random.default_rng(12)
    directions = np.linalg.qr(rng.standard_normal((32, 32)))[0].astype(np.float32)
    batch = Batch(
        np.array([576], np.int32),
        np.array([0, 64], np.int32),
        np.array([0, 9], np.int32),
        rng.permutation(9).astype(np.int32),
        9,
    )
    kv = _core.PagedKv(9, 1, 32, "f32")
    keys = np.repeat(directions[:9], 64, 0)[:, None]
    _core.kv_append(kv, keys, keys, np.array([0, 576], np.int32), *batch.lists[1:])
    alike = np.repeat(2 * directions[2][None, None], 64, 0)
    one_differs = alike.copy()
    one_differs[20] = 20 * directions[5]
    for q, of_mean, of_probe in ((alike, 2, 2), (one_differs, 2, 5)):
        for queries, page in (("mean", of_mean), ("probe", of_probe)):
            visits = _core.Visits(batch.qo_indptr, batch.kv_len, 1, 1)
            _core.block_visits(visits, q, kv, *batch.lists, queries=queries, keys=64)
            assert np.flatnonzero(visits.words[0, 0]).tolist() == [page, 8]

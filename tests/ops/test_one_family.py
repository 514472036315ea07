"""The engine's pages and a caller's arrays are two sources of one attention: what one can, the
other can, and over the same float32 numbers both give the same bits."""

from typing import Any

import numpy as np
import pytest

from effinfer import _core, ops
from tests.ops.attention_reference import fill, make_batch
from tests.ops.reference import Expected, assert_attention, attend, join, seen

KV_LENS = [1, 63, 64, 130, 300, 700]
QO_LENS = [1, 17, 3, 40, 1, 33]
HEADS, KV_HEADS, DIM = 6, 2, 64


class Case:
    """Sequences in pages, and the same keys and values as arrays (HND)."""

    def __init__(self, seed: int, dtype: str = "f32", qo_lens: list[int] = QO_LENS) -> None:
        self.rng = np.random.default_rng(seed)
        self.batch = make_batch(self.rng, KV_LENS, qo_lens)
        self.kv, self.keys, self.values = fill(self.rng, self.batch, KV_HEADS, DIM, dtype)
        self.arrays = tuple(np.nan_to_num(x) for x in self.kv.to_numpy())
        shape = (int(self.batch.qo_indptr[-1]), HEADS, DIM)
        self.q = self.rng.standard_normal(shape, np.float32)
        self.last_page_len = ((self.batch.kv_len - 1) % 64 + 1).astype(np.int32)

    @property
    def pages(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.batch.kv_indptr, self.batch.kv_indices, self.last_page_len

    def both(self, wrapper: Any, q: Any = None, **options: Any) -> list[Any]:
        """Over the pages and over the arrays."""
        rows = self.q if q is None else q
        return [wrapper.run(rows, cache, **options) for cache in (self.kv, self.arrays)]

    def expected(self, mask: Any, **scores: Any) -> Expected:
        """In float64; mask(s) is [rows, kv_len]."""
        starts = self.batch.qo_indptr
        return join(
            [
                attend(
                    self.q[starts[s] : starts[s + 1]],
                    self.keys[s],
                    self.values[s],
                    mask(s),
                    **scores,
                )
                for s in range(len(KV_LENS))
            ]
        )


def assert_same(pair: list[Any]) -> None:
    np.testing.assert_array_equal(pair[0], pair[1])


def prefill(case: Case, **options: Any) -> ops.BatchPrefillWithPagedKVCacheWrapper:
    wrapper = ops.BatchPrefillWithPagedKVCacheWrapper(None, "HND")
    wrapper.plan(case.batch.qo_indptr, *case.pages, HEADS, KV_HEADS, DIM, 64, **options)
    return wrapper


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": False},
        {"causal": True, "window_left": 70},
        {"causal": True, "logits_soft_cap": 3.0},
        {"causal": True, "pos_encoding_mode": "ALIBI"},
    ],
)
def test_wrappers_take_the_engine_s_pages(isa, options):
    case = Case(1)
    outs = case.both(prefill(case, **options), return_lse=True)
    assert_same([outs[0][0], outs[1][0]])
    assert_same([outs[0][1], outs[1][1]])


def test_sink_logits_and_masks_over_pages(isa):
    case = Case(2)
    sinks = case.rng.standard_normal(HEADS).astype(np.float32)
    assert_same(case.both(prefill(case, causal=True), sinks=sinks))
    masks = [case.rng.random(n * m) < 0.6 for n, m in zip(QO_LENS, KV_LENS, strict=True)]
    assert_same(case.both(prefill(case, custom_mask=np.concatenate(masks))))


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "i8"])
def test_pages_of_every_type_against_float64(isa, dtype):
    case = Case(3, dtype)
    sinks = case.rng.standard_normal(HEADS).astype(np.float32)
    got, lse = prefill(case, causal=True).run(case.q, case.kv, sinks=sinks, return_lse=True)
    expected = case.expected(lambda s: seen(QO_LENS[s], KV_LENS[s], True, -1), sinks=sinks)
    assert_attention(got, lse, expected)


def test_paged_attention_gives_lse_slopes_and_sinks(isa):
    case = Case(4)
    sinks = case.rng.standard_normal(HEADS).astype(np.float32)
    slopes = (2.0 ** -np.arange(1, HEADS + 1)).astype(np.float32)
    for options in ({"sink_logits": sinks}, {"alibi_slopes": slopes}, {}):
        got, lse = ops.paged_attention(
            case.q, case.kv, *case.batch.lists, return_lse=True, lse_base="ln", **options
        )
        plan = plan_of(case, causal=True)
        out, sums = np.empty_like(got), np.empty_like(lse)
        plan.run(case.q, *case.arrays, out, lse=sums, lse_base="ln", layout="HND", **options)
        assert_same([got, out])
        assert_same([lse, sums])


def plan_of(case: Case, **options: Any) -> Any:
    return _core.AttentionPlan(
        *case.batch.lists,
        page_size=64,
        num_qo_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim_qk=DIM,
        head_dim_vo=DIM,
        **options,
    )


@pytest.mark.parametrize(("window", "sinks"), [(0, 1), (70, 4), (100, 64), (130, 300)])
def test_sink_tokens_over_arrays(isa, window, sinks):
    case = Case(5)
    options = {"window_left": window, "sink_tokens": sinks}
    expected = ops.paged_attention(case.q, case.kv, *case.batch.lists, **options)
    out = np.empty_like(expected)
    plan_of(case, causal=True, **options).run(case.q, *case.arrays, out, layout="HND")
    assert_same([out, expected])


def random_lists(case: Case, aligned: bool) -> dict[str, Any]:
    """Spans of random tokens for each sequence and KV head, some of them whole pages."""
    lists, indptr, spans = [], [0], []
    for s, length in enumerate(KV_LENS):
        first, rows = case.batch.qo_indptr[s], QO_LENS[s]
        for head in range(KV_HEADS):
            lists.append((s, head, first, rows))
            step, size = (64, 64) if aligned else (23, 11)
            spans += [
                (begin, min(begin + size, length))
                for begin in range(0, length, step)
                if case.rng.random() < 0.6
            ]
            indptr.append(len(spans))
    blocks = np.array(indptr, np.int32), np.array(spans, np.int32).reshape(-1, 2)
    return {"lists": np.array(lists, np.int32), "blocks": blocks}


@pytest.mark.parametrize("aligned", [True, False])
def test_lists_of_spans_over_pages(isa, aligned):
    case = Case(6)
    plan = plan_of(case, **random_lists(case, aligned))
    outs = [np.empty_like(case.q) for _ in range(2)]
    sums = [np.empty(case.q.shape[:2], np.float32) for _ in range(2)]
    plan.run(case.q, case.kv, case.kv, outs[0], lse=sums[0])
    plan.run(case.q, *case.arrays, outs[1], lse=sums[1], layout="HND")
    assert_same(outs)
    assert_same(sums)
    assert np.isfinite(outs[0]).all()


@pytest.mark.parametrize("dtype", ["f16", "bf16", "i8"])
def test_lists_of_spans_over_narrow_pages(isa, dtype):
    case = Case(7, dtype)
    plan = plan_of(case, **random_lists(case, aligned=False))
    outs = [np.empty_like(case.q) for _ in range(2)]
    plan.run(case.q, case.kv, case.kv, outs[0])
    plan.run(case.q, *case.arrays, outs[1], layout="HND")
    np.testing.assert_allclose(outs[0], outs[1], rtol=1e-4, atol=1e-5)


def test_trees_over_pages(isa):
    case = Case(8)
    parents = np.concatenate(
        [[int(case.rng.integers(-1, i)) if i else -1 for i in range(n)] for n in QO_LENS]
    ).astype(np.int32)
    qo_indptr = case.batch.qo_indptr
    outs = [
        ops.tree_attention(case.q, cache, parents, qo_indptr, *case.pages, kv_layout="HND")
        for cache in (case.kv, case.arrays)
    ]
    assert_same(outs)
    tree = ops.paged_attention(case.q, case.kv, *case.batch.lists, parents=parents)
    # A mask knows slots only, a tree its depths: they sum in another order where these differ.
    lies_in_place = in_place(parents, qo_indptr)
    assert 0 < lies_in_place.sum() < len(parents)
    assert_same([outs[0][lies_in_place], tree[lies_in_place]])
    np.testing.assert_allclose(outs[0], tree, rtol=1e-4, atol=1e-5)


def in_place(parents: np.ndarray, qo_indptr: np.ndarray) -> np.ndarray:
    """bool [T]: whether a row and its ancestors are the first rows of their sequence."""
    depths = np.empty(len(parents), int)
    for begin, end in zip(qo_indptr[:-1], qo_indptr[1:], strict=True):
        for i in range(begin, end):
            parent = parents[i]
            depths[i] = 0 if parent < 0 else depths[begin + parent] + 1
        depths[begin:end] -= np.arange(end - begin)
    return depths == 0


@pytest.mark.parametrize("dtype", ["f32", "i8"])
@pytest.mark.parametrize("options", [{}, {"reduce": "max"}, {"window_left": 90}])
def test_attention_scores_over_pages(isa, dtype, options):
    case = Case(9, dtype)
    lists = dict(
        zip(("qo_indptr", "kv_indptr", "kv_indices", "kv_len"), case.batch.lists, strict=True)
    )
    pages = ops.attention_scores(case.q, case.kv, **lists, **options)
    arrays = ops.attention_scores(case.q, case.arrays[0], kv_layout="HND", **lists, **options)
    if dtype == "f32":
        assert_same([pages, arrays])
    else:
        np.testing.assert_allclose(pages, arrays, rtol=1e-4, atol=1e-6)
    if not options:
        ends = np.cumsum([0, *KV_LENS])
        mass = [pages[:, a:b].sum(1) for a, b in zip(ends, ends[1:], strict=False)]
        np.testing.assert_allclose(mass, np.repeat(np.array(QO_LENS)[:, None], HEADS, 1), rtol=1e-4)


def test_pages_that_do_not_fit_the_plan():
    case = Case(10)
    other = _core.PagedKv(case.batch.num_pages, KV_HEADS, 32, "f32")
    with pytest.raises(_core.InvalidArgumentError, match="kv: expected at least"):
        prefill(case).run(case.q, other)
    few = _core.PagedKv(1, KV_HEADS, DIM, "f32")
    with pytest.raises(_core.InvalidArgumentError, match="kv: expected at least"):
        prefill(case).run(case.q, few)
    rotating = prefill(case, causal=True, pos_encoding_mode="ROPE_LLAMA")
    with pytest.raises(_core.InvalidArgumentError, match="arrays with ROPE_LLAMA"):
        rotating.run(case.q, case.kv)
    with pytest.raises(_core.InvalidArgumentError, match="an array with PagedKv"):
        ops.attention_scores(case.q, case.kv)
    plan = _core.AttentionPlan(
        *case.batch.lists,
        page_size=64,
        num_qo_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim_qk=DIM,
        head_dim_vo=DIM,
    )
    for rope in ("q_rope", "k_rope"):
        with pytest.raises(_core.InvalidArgumentError, match=f"{rope}: expected None with PagedKv"):
            plan.run(case.q, case.kv, None, np.empty_like(case.q), **{rope: case.q})
    lists = dict(
        zip(("qo_indptr", "kv_indptr", "kv_indices", "kv_len"), case.batch.lists, strict=True)
    )
    with pytest.raises(_core.InvalidArgumentError, match="k: expected an array, got PagedKv"):
        ops.block_score_index(case.q, case.kv, num_blocks=1, **lists)

"""Float inputs of a graph: values that the caller gives each step, beside the tokens."""

from typing import Any

import numpy as np
import pytest

import effinfer
from effinfer import _core
from effinfer.graph import GraphBuilder

WIDTH, VOCAB = 40, 23
RNG = np.random.default_rng(11)
TABLE = RNG.standard_normal((VOCAB, WIDTH)).astype(np.float32)
HEAD = RNG.standard_normal((VOCAB, WIDTH)).astype(np.float32)


def graph(shape: tuple[Any, ...] = ("T", WIDTH), dtype: str = "f32") -> _core.Graph:
    """logits = head (silu(hidden) + embedding + hidden) of the wanted rows, and that sum."""
    g = GraphBuilder("floats")
    ids, rows = g.input("token_ids", "i32", ["T"]), g.input("logit_rows", "i32", ["R"])
    hidden = g.input("hidden", dtype, list(shape))
    table, head = g.weight("table", "f32", [VOCAB, WIDTH]), g.weight("head", "f32", [VOCAB, WIDTH])
    x = g.add(g.add(g.silu(hidden), g.embedding(ids, table)), hidden)
    x = g.select_rows(x, rows)
    g.rename(x, "sum")
    g.set_metadata("context_length", 128)
    return g.finish(g.linear(x, head), x)


def compiled(threads: int = 2, of: _core.Graph | None = None, **options: Any) -> _core.Executable:
    weights = _core.MemoryWeights()
    weights.add("table", TABLE, "f32", [VOCAB, WIDTH])
    weights.add("head", HEAD, "f32", [VOCAB, WIDTH])
    options = {"precision": "f32", "max_tokens": 90, "max_rows": 90, **options}
    pool = _core.ThreadPool(threads, oversubscribe=True)
    return _core.compile(of or graph(), weights, pool, _core.CompileOptions(**options))


def step(
    executable: _core.Executable,
    ids: list[int],
    rows: list[int],
    phase: str = "decode",
    **floats: Any,
) -> np.ndarray:
    count = len(ids)
    return executable.run(
        token_ids=ids,
        positions=list(range(count)),
        qo_indptr=[0, count],
        kv_indptr=[0, 2],
        kv_indices=[0, 1],
        kv_len=[count],
        logit_rows=rows,
        cache=executable.make_cache(2),
        phase=phase,
        float_inputs=floats,
    )


@pytest.mark.parametrize("passes", [set(), {"hoist_select_rows", "fuse_regions", "fuse_residual"}])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("threads", [1, 2])
def test_values_reach_the_graph(threads, phase, passes, isa):
    executable = compiled(threads, disabled_passes=passes)
    for count in (1, 3, 4, 5, 33, 90, 2):
        ids = RNG.integers(0, VOCAB, count).tolist()
        rows = sorted(RNG.choice(count, (count + 1) // 2, replace=False).tolist())
        hidden = RNG.standard_normal((count, WIDTH)).astype(np.float32)
        logits = step(executable, ids, rows, phase, hidden=hidden)
        exact = hidden.astype(np.float64)
        exact = exact / (1 + np.exp(-exact)) + TABLE[ids] + exact
        np.testing.assert_allclose(executable.output("sum"), exact[rows], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(logits, exact[rows] @ HEAD.T, rtol=1e-4, atol=1e-4)


def test_bad_values_are_refused_and_leave_the_executable_as_it_is():
    executable = compiled()
    good = RNG.standard_normal((3, WIDTH)).astype(np.float32)
    bad = good.copy()
    bad[1, 7] = np.nan
    expected = step(executable, [1, 2, 3], [2], hidden=good)
    for floats, part in [
        ({}, r'float_inputs: expected "hidden" once, got it 0 times'),
        ({"hidden": good, "other": good}, 'expected inputs of the graph, got "other"'),
        ({"hidden": good[:2]}, rf"hidden: expected {3 * WIDTH} values, got {2 * WIDTH}"),
        ({"hidden": bad}, "hidden: expected finite values, got nan in row 1"),
        ({"hidden": np.full_like(good, np.inf)}, "expected finite values, got inf in row 0"),
    ]:
        with pytest.raises(effinfer.InvalidArgumentError, match=part):
            step(executable, [1, 2, 3], [2], **floats)
    np.testing.assert_array_equal(step(executable, [1, 2, 3], [2], hidden=good), expected)


@pytest.mark.parametrize(
    ("shape", "dtype"), [(("R", WIDTH), "f32"), (("T",), "f32"), (("T", WIDTH), "f16")]
)
def test_other_inputs_are_refused(shape, dtype):
    g = GraphBuilder("wrong")
    g.input("hidden", dtype, list(shape))
    ids, rows = g.input("token_ids", "i32", ["T"]), g.input("logit_rows", "i32", ["R"])
    x = g.select_rows(g.embedding(ids, g.weight("table", "f32", [VOCAB, WIDTH])), rows)
    g.set_metadata("context_length", 128)
    wrong = g.finish(g.linear(x, g.weight("head", "f32", [VOCAB, WIDTH])))
    with pytest.raises(
        effinfer.InvalidArgumentError, match=r"input %hidden: expected .*f32\[T, size\]"
    ):
        compiled(of=wrong)

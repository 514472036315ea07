"""Indices in a graph: which keys attention visits in prefill."""

from typing import Any

import numpy as np
import pytest

from effinfer import _core
from effinfer.techniques import (
    HyperAttention,
    MInference,
    SampleAttention,
    SparsePrefill,
    XAttention,
)
from tests.compiler.interpreter import Array, attention, evaluate
from tests.compiler.tiny_models import HEAD_DIM, Stepper, TinyModel, make_gemma, make_llama, sparse
from tests.ops.test_block_budgets import probe_query

TOKENS = np.random.default_rng(8).integers(0, 101, 230).tolist()
BLOCK_ROWS = 64
STEPS = {"max_tokens": 256, "max_rows": 256}


class Everything(SparsePrefill):
    def indices(self, layer: int, kv_heads: int) -> list[tuple[str, dict[str, Any]]]:
        return [("column_index", {"columns": 1000})]


def logits(model: TinyModel, cuts: list[int] = (), **options: Any) -> Array:
    """Of TOKENS in steps that end at `cuts`."""
    stepper = Stepper(model.compile(**STEPS, **options))
    parts = np.split(np.asarray(TOKENS), cuts)
    return np.concatenate([stepper.step({0: part.tolist()}, "prefill")[0] for part in parts])


@pytest.mark.parametrize("precision", ["fast", "f32"])
def test_visiting_everything_is_dense_attention(isa, precision):
    model = make_llama(q="q8_0", k="q8_0", v="q8_0")
    expected = logits(model, precision=precision)
    actual = logits(sparse(model, Everything()), precision=precision)
    np.testing.assert_array_equal(actual, expected)


def test_layers_with_windows_stay_as_they_are():
    graph = make_gemma().graph
    assert "column_index" not in MInference().graph(graph).to_string()


# A-shape of whole blocks of rows, which is what an index does: as the heads of a mask.
def a_shape_attention(dense_heads: list[int], sink_tokens: int, local_tokens: int):
    def attend(q: Array, kv: tuple[Array, Array], *_: Any, **shape: Any) -> Array:
        tokens = len(q)
        first = np.arange(tokens) // BLOCK_ROWS * BLOCK_ROWS - local_tokens + 1
        key = np.arange(tokens)
        hidden = (key[None, :] < first[:, None]) & (key >= sink_tokens)[None, :]
        dense = attention(q, kv, **shape).reshape(tokens, shape["kv_heads"], -1)
        out = np.empty_like(dense)
        group = shape["heads"] // shape["kv_heads"]
        for head in range(shape["kv_heads"]):
            if head in dense_heads:
                out[:, head] = dense[:, head]
                continue
            for i in range(group):
                at = (head * group + i) * HEAD_DIM
                k, v = (x[:, head * HEAD_DIM : (head + 1) * HEAD_DIM] for x in kv)
                scores = q[:, at : at + HEAD_DIM] @ k.T * shape["sm_scale"]
                scores[hidden | (key[None, :] > key[:, None])] = -np.inf
                p = np.exp(scores - scores.max(-1, keepdims=True))
                part = slice(i * HEAD_DIM, (i + 1) * HEAD_DIM)
                out[:, head, part] = p / p.sum(-1, keepdims=True) @ v
        return out.reshape(tokens, -1)

    return attend


def check_attends(method: SparsePrefill, attend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's rows attend as `attend` does in float64, and not to all keys."""
    model = make_llama()
    monkeypatch.setitem(evaluate.__globals__["OPS"], "attention", attend)
    expected = evaluate(model.graph, model.exact, TOKENS)
    actual = logits(sparse(model, method), precision="f32")
    assert np.abs(actual - expected).max() < 1e-4 * np.abs(expected).max()
    dense = logits(model, precision="f32")
    assert np.abs(actual - dense).max() > 1e-2 * np.abs(dense).max()


@pytest.mark.parametrize("only", [[], [1]])
def test_an_index_decides_for_its_heads(only, monkeypatch):
    class AShape(SparsePrefill):
        def indices(self, layer: int, kv_heads: int) -> list[tuple[str, dict[str, Any]]]:
            return [("column_index", {"sink_tokens": 5, "local_tokens": 20, "only": only})]

    check_attends(AShape(), a_shape_attention([0] if only else [], 5, 20), monkeypatch)


class ProbeQueries(SparsePrefill):
    """A page for each KV head by its blocks' probe queries, and no others but a row's own."""

    def indices(self, layer: int, kv_heads: int) -> list[tuple[str, dict[str, Any]]]:
        return [("block_index", {"queries": "probe", "keys": 64})]


def probe_attention(q: Array, kv: tuple[Array, Array], *_: Any, **shape: Any) -> Array:
    """What blocks attend to with ProbeQueries."""
    group = shape["heads"] // shape["kv_heads"]
    out = np.empty_like(q)
    for head in range(shape["kv_heads"]):
        k, v = (x[:, head * HEAD_DIM : (head + 1) * HEAD_DIM] for x in kv)
        own = slice(head * group * HEAD_DIM, (head + 1) * group * HEAD_DIM)
        for begin in range(0, len(q), BLOCK_ROWS):
            rows = q[begin : begin + BLOCK_ROWS, own]
            probe = probe_query(rows.reshape(len(rows), group, HEAD_DIM))
            end = begin + len(rows)
            hidden = np.arange(end)[None, :] > np.arange(begin, end)[:, None]
            if begin > 0:
                means = k[:begin].reshape(-1, BLOCK_ROWS, HEAD_DIM).mean(1)
                logits = np.exp(probe @ means.T * shape["sm_scale"])
                chosen = (logits / logits.sum(-1, keepdims=True)).sum(0).argmax()
                hidden |= (np.arange(end) < begin) & (np.arange(end) // BLOCK_ROWS != chosen)
            for i in range(group):
                part = slice(i * HEAD_DIM, (i + 1) * HEAD_DIM)
                scores = np.where(hidden, -np.inf, rows[:, part] @ k[:end].T * shape["sm_scale"])
                p = np.exp(scores - scores.max(-1, keepdims=True))
                out[begin:end, own][:, part] = p / p.sum(-1, keepdims=True) @ v[:end]
    return out


def test_blocks_attend_to_what_their_probe_queries_find(monkeypatch):
    check_attends(ProbeQueries(), probe_attention, monkeypatch)


METHODS = [
    MInference(min_tokens=0, vertical_size=4, slash_size=3, local_tokens=10, sink_tokens=2),
    MInference(
        pattern="block_sparse",
        patterns={(0, 0): "a_shape", (1, 1): "vertical_slash"},
        min_tokens=0,
        num_blocks=1,
        a_shape_local_tokens=30,
        a_shape_sink_tokens=3,
    ),
    SampleAttention(min_tokens=0, mass=0.3, local_tokens=10),
    XAttention(min_tokens=0, threshold=0.5, stride=4),
    HyperAttention(min_tokens=0, keys=10, samples=5, bits=3, local_tokens=1),
    ProbeQueries(),
]


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_passes_and_threads_change_no_bits(method):
    model = sparse(make_llama(q="q4_0", k="q8_0", v="q8_0"), method)
    expected = logits(model, [100])
    names = ["fuse_rope_append", "fuse_regions", "fuse_attention"]
    for disabled in ([], *([name] for name in names), names):
        actual = logits(model, [100], disabled_passes=set(disabled), threads=3)
        np.testing.assert_array_equal(actual, expected)
    assert (expected != logits(make_llama(q="q4_0", k="q8_0", v="q8_0"), [100])).any()


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_what_is_chosen_depends_on_its_own_sequence(method):
    # Of 64 rows, which are one tile of attention, and more.
    model = sparse(make_llama(), method)
    for rows in (64, 90):
        parts = [TOKENS[:rows], TOKENS[rows : 2 * rows]]
        alone = Stepper(model.compile(**STEPS))
        expected = [alone.step({0: part}, "prefill")[0] for part in parts]
        unfused = Stepper(model.compile(**STEPS, disabled_passes={"fuse_regions"}))
        for part, logits in zip(parts, expected, strict=True):
            np.testing.assert_array_equal(unfused.step({0: part}, "prefill")[0], logits)
        for beside in (1, 7, 64):
            both = Stepper(model.compile(**STEPS), 2)
            for place, part in enumerate(parts):
                other = TOKENS[place * beside : (place + 1) * beside]
                actual = both.step({1: other, 0: part}, "prefill")[1]
                np.testing.assert_array_equal(actual, expected[place])


def test_steps_of_few_rows_are_dense():
    # Tokens, drafts and the short rest of a prompt see all keys.
    dense, short = make_llama(), sparse(make_llama(), METHODS[0])
    cuts = [60, 61, 70, 133, 190]
    expected = logits(dense, cuts, precision="f32")
    np.testing.assert_array_equal(logits(short, cuts, precision="f32"), expected)
    assert (logits(short, precision="f32") != expected).any()


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_dense_sequence_has_the_bits_of_a_graph_without_indices(method):
    model = make_llama()
    part, rest = TOKENS[:150], TOKENS[150:]
    chosen, plain = logits(sparse(model, method), [150]), logits(model, [150])
    assert (chosen != plain).any()
    for dense in ([0, 0], [1, 0], [0, 1], [1, 1]):
        stepper = Stepper(sparse(model, method).compile(max_tokens=512, max_rows=512), 2)
        first = stepper.step({0: part, 1: part}, "prefill", dense)
        second = stepper.step({0: rest, 1: rest}, "prefill", dense)
        for sequence, flag in enumerate(dense):
            actual = np.concatenate([first[sequence], second[sequence]])
            np.testing.assert_array_equal(actual, plain if flag else chosen)


@pytest.mark.parametrize(
    ("dense", "message"),
    [([1], "dense: expected none or 2 entries, got 1"), ([0, 2], r"dense\[1\]: .* 0 or 1, got 2")],
)
def test_wrong_flags_are_refused(dense, message):
    stepper = Stepper(make_llama().compile(**STEPS), 2)
    with pytest.raises(_core.InvalidArgumentError, match=message):
        stepper.step({0: [1, 2], 1: [3]}, "prefill", dense)


def test_explain_names_the_index_and_the_limits():
    text = sparse(make_llama(), XAttention()).compile().explain()
    assert "block_index" in text
    assert "antidiagonals of 8" in text
    assert "2048 keys" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{only = [2]}", "only: expected KV heads in increasing order"),
        ("{only = [1, 0]}", "only: expected KV heads in increasing order"),
        ("{columns = -1}", "columns: expected an integer in 0"),
        ("{column_mass = 1.5}", "column_mass: expected a share"),
        ("{last_rows = 0}", "last_rows: expected an integer in 1"),
        ("{min_tokens = -1}", "min_tokens"),
    ],
)
def test_wrong_indices_are_refused(text, message):
    name, value = text.strip("{}").split(" = ")
    parsed = eval(value)

    class Wrong(SparsePrefill):
        def indices(self, layer: int, kv_heads: int) -> list[tuple[str, dict[str, Any]]]:
            return [("column_index", {name: parsed})]

    with pytest.raises(_core.InvalidArgumentError, match=message):
        Wrong().graph(make_llama().graph)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"queries": "median"}, 'queries: expected "mean", or "probe" with a stride of 0'),
        ({"queries": "probe", "stride": 8}, 'queries: expected "mean", or "probe" with a stride'),
        ({"keys": -1}, "keys: expected an integer in 0"),
        ({"share": 1.5}, "share: expected a share"),
        ({"keys": 64, "pages": 1}, "keys: expected 0, and share, with pages or mass"),
        ({"share": 0.5, "mass": 0.5}, "keys: expected 0, and share, with pages or mass"),
    ],
)
def test_wrong_blocks_are_refused(options, message):
    class Wrong(SparsePrefill):
        def indices(self, layer: int, kv_heads: int) -> list[tuple[str, dict[str, Any]]]:
            return [("block_index", options)]

    with pytest.raises(_core.InvalidArgumentError, match=message):
        Wrong().graph(make_llama().graph)


def test_a_graph_with_indices_prints_and_parses():
    graph = METHODS[1].graph(make_llama().graph)
    again = _core.Graph.parse(graph.to_string())
    again.verify()
    assert again == graph

"""page_index and key_index in a graph: which keys generated tokens visit."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from effinfer import _core
from effinfer.techniques import DoubleSparsity, Quest, TokenSelect, XAttention
from tests.compiler.tiny_models import (
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    Stepper,
    TinyModel,
    make_gemma,
    make_llama,
)

TOKENS = np.random.default_rng(8).integers(0, 101, 250).tolist()
PROMPT = 240  # of pages 0 to 3; behind the first and before the two newest one is chosen from
STEPS = {"max_tokens": 256, "max_rows": 256}
NOTHING_CHOSEN = Quest(unit=16, budget=192, min_tokens=0, skip_layers=0)
EVERYTHING = Quest(unit=16, budget=256, min_tokens=0, skip_layers=0)
# Of the 64 keys that are chosen from.
SOME = [
    Quest(unit=16, budget=224, min_tokens=0, skip_layers=0),
    TokenSelect(budget=202, min_tokens=0, skip_layers=0),
    DoubleSparsity(
        budget=202,
        min_tokens=0,
        skip_layers=0,
        channels=2,
        labels=(0, 1, 4, 5, 6, 7, 10, 11),
    ),
]


def sparse(model: TinyModel, method: Any) -> TinyModel:
    return TinyModel(method.graph(model.graph), model.source, model.exact)


def generated(model: TinyModel, rows: int = 1, dense: list[int] | None = None, **options: Any):
    """Logits of the tokens behind the prompt, which are fed in steps of `rows`."""
    stepper = Stepper(model.compile(**STEPS, **options))
    stepper.step({0: TOKENS[:PROMPT]}, "prefill")
    parts = [TOKENS[i : i + rows] for i in range(PROMPT, len(TOKENS), rows)]
    return np.concatenate([stepper.step({0: part}, "decode", dense)[0] for part in parts])


@pytest.mark.parametrize("precision", ["fast", "f32"])
def test_visiting_everything_is_dense_attention(isa, precision):
    model = make_llama(q="q8_0", k="q8_0", v="q8_0")
    expected = generated(model, precision=precision)
    actual = generated(sparse(model, EVERYTHING), precision=precision)
    np.testing.assert_array_equal(actual, expected)
    chosen = generated(sparse(model, NOTHING_CHOSEN), precision=precision)
    assert (chosen != expected).any(-1).all()


@pytest.mark.parametrize("method", SOME, ids=lambda method: method.name)
def test_rows_choose_alike_however_many_share_a_step(isa, method):
    model = sparse(make_llama(), method)
    expected = generated(model)
    for rows in (2, 3, 10):
        np.testing.assert_array_equal(generated(model, rows), expected)


@pytest.mark.parametrize("method", SOME, ids=lambda method: method.name)
def test_passes_and_threads_change_no_bits(method):
    model = sparse(make_llama(q="q4_0", k="q8_0", v="q8_0"), method)
    expected = generated(model)
    names = ["fuse_rope_append", "fuse_regions", "fuse_attention"]
    for disabled in ([], *([name] for name in names), names):
        actual = generated(model, disabled_passes=set(disabled), threads=3)
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("method", SOME, ids=lambda method: method.name)
def test_what_is_chosen_depends_on_its_own_sequence(method):
    model = sparse(make_llama(), method)
    expected = generated(model)
    both = Stepper(model.compile(max_tokens=512, max_rows=512), 2)
    both.step({0: TOKENS[:PROMPT], 1: TOKENS[30:]}, "prefill")
    for i, token in enumerate(TOKENS[PROMPT:]):
        actual = both.step({1: [i], 0: [token]}, "decode")[1]
        np.testing.assert_array_equal(actual, expected[i : i + 1])


def test_a_dense_sequence_has_the_bits_of_a_graph_without_an_index():
    model = make_llama()
    actual = generated(sparse(model, NOTHING_CHOSEN), dense=[1])
    np.testing.assert_array_equal(actual, generated(model))


def test_blocks_of_prompts_and_generated_rows_have_lists_of_their_own():
    model = make_llama()
    prompts = XAttention(min_tokens=0, threshold=0.3, stride=4)

    def last(methods: list[Any]) -> tuple[np.ndarray, np.ndarray]:
        stepper = Stepper(sparse_all(model, methods).compile(**STEPS))
        prompt = stepper.step({0: TOKENS[:PROMPT]}, "prefill")[0]
        return prompt, stepper.step({0: TOKENS[PROMPT : PROMPT + 1]}, "decode")[0]

    def sparse_all(model: TinyModel, methods: list[Any]) -> TinyModel:
        for method in methods:
            model = sparse(model, method)
        return model

    both, alone = last([prompts, NOTHING_CHOSEN]), last([prompts])
    np.testing.assert_array_equal(both[0], alone[0])
    assert (both[1] != alone[1]).any()
    limit = last([prompts, EVERYTHING])
    np.testing.assert_array_equal(limit[1], alone[1])


@pytest.mark.parametrize("method", SOME, ids=lambda method: method.name)
def test_an_index_is_for_its_heads(method):
    model = make_llama()
    text = sparse(model, method).graph.to_string()

    def logits(only: str) -> np.ndarray:
        graph = _core.Graph.parse(text.replace("only = []", f"only = {only}"))
        return generated(TinyModel(graph, model.source, model.exact))

    expected = logits("[]")
    np.testing.assert_array_equal(logits("[0, 1]"), expected)
    assert (logits("[0]") != expected).any()
    assert (logits("[0]") != generated(model)).any()


def test_layers_with_small_windows_stay_as_they_are():
    assert "page_index" not in Quest().graph(make_gemma().graph).to_string()


def with_window(model: TinyModel, window: int) -> TinyModel:
    text = model.graph.to_string().replace("window_left = -1", f"window_left = {window}")
    return TinyModel(_core.Graph.parse(text), model.source, model.exact)


def test_windows_are_chosen_from_where_they_are_larger_than_min_tokens():
    graph = with_window(make_llama(), 511).graph
    for least, indices in ((511, LAYERS), (512, 0)):
        text = Quest(min_tokens=least, skip_layers=0).graph(graph).to_string()
        assert text.count("= page_index(") == indices
        assert text.count("window_left = 511") == LAYERS + indices
    copying = Quest(min_tokens=0, skip_layers=0, reuse_layers=2)
    keeping = TokenSelect(min_tokens=0, skip_layers=0, reuse=0.9)
    assert copying.graph(graph) == keeping.graph(graph) == graph


@pytest.mark.parametrize("method", SOME, ids=lambda method: method.name)
def test_rows_choose_of_their_windows(isa, method):
    """Of a window that holds the last 56 keys of page 0 and page 1 is chosen from."""
    model = with_window(make_llama(), 231)
    dense = generated(model)
    everything = generated(sparse(model, replace(method, budget=1 << 30)))
    np.testing.assert_array_equal(everything, dense)
    expected = generated(sparse(model, method))
    assert (expected != dense).any(-1).all()
    for rows in (2, 3, 10):
        np.testing.assert_array_equal(generated(sparse(model, method), rows), expected)


def test_a_choice_is_kept_of_layers_without_a_window_alone():
    graph = TokenSelect(min_tokens=0, skip_layers=0, reuse=0.9).graph(make_llama().graph)
    text = graph.to_string().replace("window_left = -1", "window_left = 9")
    with pytest.raises(_core.FormatError, match="window_left: expected -1 with reuse"):
        _core.Graph.parse(text).verify()


def test_first_layers_are_skipped():
    def indices(skipped: int) -> int:
        graph = Quest(skip_layers=skipped).graph(make_llama().graph)
        return graph.to_string().count("= page_index(")

    assert [indices(n) for n in (0, 1, 9)] == [LAYERS, LAYERS - 1, 0]


def test_a_cache_for_another_index_is_refused():
    executable = sparse(make_llama(), EVERYTHING).compile()
    shape = {"num_layers": LAYERS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "num_pages": 4}
    stepper = Stepper(executable)
    for unit, means in ((0, False), (1, False), (64, False), (16, True)):
        stepper.cache = _core.KvCache(**shape, index_unit=unit, index_means=means)
        with pytest.raises(_core.InvalidArgumentError, match="an index of 16 keys by bounds"):
            stepper.step({0: [1, 2]}, "decode")
    stepper = Stepper(executable)
    stepper.cache = _core.KvCache(**shape, index_unit=16)
    assert np.isfinite(stepper.step({0: [1, 2]}, "decode")[0]).all()
    with pytest.raises(_core.InvalidArgumentError, match="index_unit: expected 0, 1, 16, 32 or 64"):
        _core.KvCache(**shape, index_unit=48)


@pytest.mark.parametrize(
    ("score", "got"),
    [("bounds", "64 keys by bounds, got 16 by bounds"), ("means", "16 keys by means, got 16 by")],
)
def test_two_kinds_of_indices_are_refused(score, got):
    model = make_llama()
    first, *others = re.split("(?<=vote)", sparse(model, EVERYTHING).graph.to_string(), maxsplit=1)
    first = first.replace("unit = 16", "unit = 64").replace('"bounds"', f'"{score}"')
    graph = _core.Graph.parse("".join([first, *others]))
    with pytest.raises(_core.InvalidArgumentError, match=got):
        TinyModel(graph, model.source, model.exact).compile()


@pytest.mark.parametrize(
    ("unit", "means", "share"),
    [(1, False, 0.0), (16, False, 0.12), (16, True, 0.06), (32, False, 0.06), (64, False, 0.03)],
)
def test_what_is_kept_takes_a_small_share_of_the_cache(unit, means, share):
    shape = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 64, "num_pages": 100}
    for dtype in ("f32", "f16", "bf16", "i8"):
        plain = _core.KvCache(**shape, dtype=dtype).num_bytes
        kept = _core.KvCache(**shape, dtype=dtype, index_unit=unit, index_means=means).num_bytes
        assert share / 8 <= (kept - plain) / plain <= share


def test_explain_names_the_index_and_the_limits():
    text = sparse(make_llama(), Quest(unit=16, budget=512, skip_layers=0)).compile().explain()
    assert "[page_index] unit=16 keys=320" in text
    assert "all keys: rows of prompts, or of fewer than 2048 keys" in text


@pytest.mark.parametrize(
    ("method", "name", "value"),
    [
        (0, "keys", "-1"),
        (0, "unit", "48"),
        (0, "score", '"sums"'),
        (0, "vote", '"all"'),
        (0, "share", "1.5"),
        (0, "sink_tokens", "-1"),
        (0, "min_tokens", "-1"),
        (0, "only", "[2]"),
        (1, "keys", "-1"),
        (1, "channels", "[1]"),
        (2, "channels", "[1, 0, 1, 2]"),
        (2, "channels", "[1, 16, 1, 2]"),
    ],
)
def test_wrong_indices_are_refused(method, name, value):
    text = sparse(make_llama(), SOME[method]).graph.to_string()
    wrong, count = re.subn(rf"\b{name} = (\[[^]]*\]|[^,}}]+)", f"{name} = {value}", text)
    assert count > 0
    with pytest.raises(_core.FormatError, match=name):
        _core.Graph.parse(wrong).verify()

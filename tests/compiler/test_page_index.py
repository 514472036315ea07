"""page_index and key_index in a graph: which keys generated tokens visit."""

import re
from dataclasses import replace

import numpy as np
import pytest

from effinfer import _core
from effinfer.techniques import Quest, TokenSelect, XAttention
from tests.compiler.generated_rows import CHOOSING, generated, prompt_and_next
from tests.compiler.tiny_models import (
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    Stepper,
    TinyModel,
    make_gemma,
    make_llama,
    sparse,
    with_attribute,
)

NOTHING_CHOSEN = Quest(unit=16, budget=192, min_tokens=0, skip_layers=0)
EVERYTHING = Quest(unit=16, budget=256, min_tokens=0, skip_layers=0)


def test_visiting_everything_behind_a_prompt_that_chose_is_dense_attention():
    prompts = sparse(make_llama(), XAttention(min_tokens=0, threshold=0.3, stride=4))
    limit = prompt_and_next(sparse(prompts, EVERYTHING))
    np.testing.assert_array_equal(limit[1], prompt_and_next(prompts)[1])


@pytest.mark.parametrize("precision", ["fast", "f32"])
def test_visiting_everything_is_dense_attention(isa, precision):
    model = make_llama(q="q8_0", k="q8_0", v="q8_0")
    expected = generated(model, precision=precision)
    actual = generated(sparse(model, EVERYTHING), precision=precision)
    np.testing.assert_array_equal(actual, expected)
    chosen = generated(sparse(model, NOTHING_CHOSEN), precision=precision)
    assert (chosen != expected).any(-1).all()


def test_layers_with_small_windows_stay_as_they_are():
    assert "page_index" not in Quest().graph(make_gemma().graph).to_string()


def test_windows_are_chosen_from_where_they_are_larger_than_min_tokens():
    graph = with_attribute(make_llama(), "window_left", "511").graph
    for least, indices in ((511, LAYERS), (512, 0)):
        text = Quest(min_tokens=least, skip_layers=0).graph(graph).to_string()
        assert text.count("= page_index(") == indices
        assert text.count("window_left = 511") == LAYERS + indices
    copying = Quest(min_tokens=0, skip_layers=0, reuse_layers=2)
    keeping = TokenSelect(min_tokens=0, skip_layers=0, reuse=0.9)
    assert copying.graph(graph) == keeping.graph(graph) == graph


@pytest.mark.parametrize("method", CHOOSING, ids=lambda method: method.name)
def test_rows_choose_of_their_windows(isa, method):
    """Of a window that holds the last 56 keys of page 0 and page 1 is chosen from."""
    model = with_attribute(make_llama(), "window_left", "231")
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
    wrong = with_attribute(sparse(make_llama(), CHOOSING[method]), name, value)
    with pytest.raises(_core.FormatError, match=name):
        wrong.graph.verify()

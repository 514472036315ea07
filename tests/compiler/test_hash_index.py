"""hash_index in a graph: which keys generated tokens draw, and how often they count."""

import re

import numpy as np
import pytest

from effinfer import _core
from effinfer.techniques import MagicPIG, Quest
from effinfer.techniques.weights import with_weights
from tests.compiler.generated_rows import DRAWING, MEANS, TOKENS, generated
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

NONE_DRAWN = MagicPIG(bits=8, tables=8, min_tokens=0, skip_layers=0, means=MEANS)


def test_it_does_something(isa):
    model = make_llama()
    expected = generated(model)
    some, none = (generated(sparse(model, method)) for method in (DRAWING, NONE_DRAWN))
    assert (some != expected).any(-1).all()
    assert (some != none).any()


@pytest.mark.parametrize("precision", ["fast", "f32"])
def test_rows_behind_few_keys_have_the_bits_of_dense_attention(precision):
    model = make_llama(q="q8_0", k="q8_0", v="q8_0")
    limit = MagicPIG(min_tokens=len(TOKENS) + 1, skip_layers=0, means=MEANS)
    np.testing.assert_array_equal(
        generated(sparse(model, limit), precision=precision), generated(model, precision=precision)
    )


def test_seed_and_means_are_what_they_are():
    model = make_llama()
    expected = generated(sparse(model, DRAWING))
    for name, value in (("seed", "1"), ("means", "[]")):
        other = with_attribute(sparse(model, DRAWING), name, value)
        assert (generated(other) != expected).any()


def test_layers_with_windows_stay_as_they_are():
    gemma = make_gemma().graph
    assert "hash_index" not in MagicPIG().graph(gemma).to_string()
    with pytest.raises(_core.InvalidArgumentError, match=r"\[MagicPIG\] means: expected 64 \("):
        MagicPIG(means=MEANS[1:]).graph(make_llama().graph)


def test_a_cache_for_another_index_is_refused():
    executable = sparse(make_llama(), DRAWING).compile()
    shape = {"num_layers": LAYERS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "num_pages": 4}
    stepper = Stepper(executable)
    with pytest.raises(_core.InvalidArgumentError) as raised:
        stepper.cache = _core.KvCache(**shape, index_unit=1)
        stepper.step({0: [1, 2]}, "decode")
    found = re.search(r"an index of 1 keys by (\d+) bits", str(raised.value))
    assert found is not None
    bits = int(found[1])
    assert bits % (3 * 8) == 0
    stepper = Stepper(executable)
    stepper.cache = _core.KvCache(**shape, index_unit=1, index_bits=bits)
    assert np.isfinite(stepper.step({0: [1, 2]}, "decode")[0]).all()
    for unit, wrong in ((16, bits), (1, -1), (0, bits)):
        with pytest.raises(_core.InvalidArgumentError, match=r"index_(bits|unit): expected"):
            _core.KvCache(**shape, index_unit=unit, index_bits=wrong)


def test_codes_take_their_bits_of_memory():
    shape = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 64, "num_pages": 100}
    plain = _core.KvCache(**shape).num_bytes
    kept = _core.KvCache(**shape, index_unit=1, index_bits=576).num_bytes
    codes = 3 * 2 * 100 * 64 * 576 // 8
    assert codes <= kept - plain <= codes + 3 * 2 * 100 * 4


def test_two_kinds_of_indices_are_refused():
    model = make_llama()
    text = sparse(model, DRAWING).graph.to_string()
    graph = _core.Graph.parse(text.replace("tables = 8", "tables = 16", 1))
    message = r"\[hash_index\] bits, tables: expected .* 1 keys by (\d+) bits, got 1 by \d+ bits"
    with pytest.raises(_core.InvalidArgumentError, match=message):
        TinyModel(graph, model.source, model.exact).compile()


@pytest.mark.parametrize("other", [DRAWING, Quest(budget=256, skip_layers=0)], ids=["hash", "page"])
def test_two_indices_of_a_layers_generated_tokens_are_refused(other):
    message = r"\[hash_index\] layer: expected no other index of its layer's generated rows, got"
    for methods in ((DRAWING, other), (other, DRAWING)):
        model = make_llama()
        for method in methods:
            model = sparse(model, method)
        with pytest.raises(_core.InvalidArgumentError, match=message):
            model.compile()


def test_weights_of_two_kinds_are_refused():
    model = make_llama()
    graph = with_weights(sparse(model, DRAWING).graph, "weights")
    with pytest.raises(_core.UnsupportedError, match=r'weights: expected no plane.*got "weights"'):
        TinyModel(graph, model.source, model.exact).compile()


def test_explain_names_the_index_and_the_limits():
    text = sparse(make_llama(), MagicPIG(means=MEANS, skip_layers=0)).compile().explain()
    assert "[hash_index] bits=8 tables=40 of each query head" in text
    assert "all keys: rows of prompts, or of fewer than 2048 keys" in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bits", "9"),
        ("bits", "0"),
        ("tables", "12"),
        ("tables", "0"),
        ("seed", "-1"),
        ("means", "[1]"),
        ("sink_tokens", "-1"),
        ("min_tokens", "-1"),
        ("only", "[2]"),
    ],
)
def test_wrong_indices_are_refused(name, value):
    with pytest.raises(_core.FormatError, match=name):
        with_attribute(sparse(make_llama(), DRAWING), name, value).graph.verify()

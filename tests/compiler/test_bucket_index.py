"""bucket_index in a graph: prompts whose rows draw some keys, which count for the others."""

from typing import Any

import numpy as np
import pytest

from effinfer import _core
from effinfer.techniques import HyperAttention, SparsePrefill, XAttention
from effinfer.techniques.weights import with_weights
from tests.compiler.generated_rows import DRAWING
from tests.compiler.test_sparse_prefill import logits
from tests.compiler.tiny_models import TinyModel, make_llama, sparse, with_attribute

SOME = HyperAttention(min_tokens=0, keys=20, samples=9, bits=3, local_tokens=1)


@pytest.mark.parametrize("precision", ["fast", "f32"])
def test_as_many_samples_as_keys_are_dense_attention(isa, precision):
    model = make_llama(q="q8_0", k="q8_0", v="q8_0")
    expected = logits(model, precision=precision)
    everything = HyperAttention(min_tokens=0, keys=100, samples=100, local_tokens=1)
    actual = logits(sparse(model, everything), precision=precision)
    np.testing.assert_array_equal(actual, expected)
    # Draws that leave one key of a page out change little, and yet something.
    most = HyperAttention(min_tokens=0, keys=10, samples=53, local_tokens=1)
    actual = logits(sparse(model, most), precision=precision)
    assert (actual != expected).any()


def test_samples_count_for_what_is_left_out():
    """The mean of the logits of 20 seeds is the nearer to those of all keys the more is drawn, and
    nearer than without samples. What attention is as exact as is in test_bucket_index.cpp."""
    model = make_llama()
    exact = logits(model, precision="f32")

    def distance(count: int, **options: Any) -> float:
        found = [
            logits(sparse(model, HyperAttention(**common, **options, seed=seed)), precision="f32")
            for seed in range(count)
        ]
        return float(np.linalg.norm(np.mean(found, axis=0) - exact))

    common = {"min_tokens": 0, "keys": 0, "local_tokens": 1}
    assert distance(20, samples=40) < distance(20, samples=10) < distance(1, samples=0)


class Mixed(SparsePrefill):
    """Lists with weights in the first layer alone."""

    def indices(self, layer: int, kv_heads: int) -> list[tuple[str, dict[str, Any]]]:
        method = SOME if layer == 0 else XAttention(min_tokens=0, threshold=0.3, stride=4)
        return method.indices(layer, kv_heads)


def test_lists_of_one_kind_have_no_weights_of_the_other():
    model = make_llama()
    expected = logits(sparse(model, Mixed()))
    with_rows = sparse(sparse(model, Mixed()), DRAWING)
    np.testing.assert_array_equal(logits(with_rows), expected)
    only_rows = sparse(model, DRAWING)
    np.testing.assert_array_equal(logits(only_rows), logits(model))


def test_two_indices_of_a_layers_prompts_are_refused():
    message = r"\[bucket_index\] layer: expected no other index of its layer's prompts, got block"

    class Both(SparsePrefill):
        def indices(self, layer: int, kv_heads: int) -> list[tuple[str, dict[str, Any]]]:
            (bucket,), (block,) = (each.indices(layer, kv_heads) for each in (SOME, XAttention()))
            return [(bucket[0], bucket[1] | {"only": [0]}), (block[0], block[1] | {"only": [1]})]

    with pytest.raises(_core.InvalidArgumentError, match=message):
        sparse(make_llama(), Both()).compile()


def test_an_index_is_for_its_heads_and_others_visit_all():
    model = make_llama()

    def of(only: str) -> np.ndarray:
        return logits(with_attribute(sparse(model, SOME), "only", only))

    expected = of("[]")
    np.testing.assert_array_equal(of("[0, 1]"), expected)
    assert (of("[0]") != expected).any()
    assert (of("[0]") != logits(model)).any()


def test_weights_of_two_kinds_are_refused():
    model = make_llama()
    graph = with_weights(sparse(model, SOME).graph, "weights")
    with pytest.raises(_core.UnsupportedError, match=r"weights: expected no plane"):
        TinyModel(graph, model.source, model.exact).compile()


def test_explain_names_the_index_and_the_limits():
    text = sparse(make_llama(), HyperAttention()).compile().explain()
    assert "[bucket_index] bits=8 keys=" in text
    assert "blocks behind fewer than 2048 keys" in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bits", "9"),
        ("bits", "0"),
        ("keys", "-1"),
        ("samples", "-1"),
        ("seed", "-1"),
        ("sink_tokens", "-1"),
        ("only", "[2]"),
    ],
)
def test_wrong_indices_are_refused(name, value):
    with pytest.raises(_core.FormatError, match=name):
        with_attribute(sparse(make_llama(), SOME), name, value).graph.verify()

"""Graphs without layers, with a smaller head, with hidden states: each against the whole model,
over one set of packed weights."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import effinfer
from effinfer import _core
from effinfer.checkpoints.model_files import ModelFiles, open_model
from effinfer.graph import GraphBuilder
from effinfer.techniques.layers import num_layers, with_hidden_states
from effinfer.techniques.skip_layers import EarlyExit, SkipLayers
from effinfer.techniques.vocab_trim import TOKENS_KEY, VocabTrim
from tests.model_files import smollm2_path
from tests.reference import tiny

TOKENS = np.random.default_rng(3).integers(0, tiny.VOCAB_SIZE, 23)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelFiles]:
    folder = tmp_path_factory.mktemp("models")
    return {
        name: open_model(tiny.write_gguf(family, folder / f"{name}.gguf"))
        for name, family in tiny.FAMILIES.items()
    }


def build(model: ModelFiles, graph: Any = None, **options: Any) -> _core.Executable:
    defaults = {"precision": "f32", "max_tokens": 64, "max_seq_len": 256, "max_rows": 64}
    pool = _core.ThreadPool(2, oversubscribe=True)
    options_of = _core.CompileOptions(**{**defaults, **options})
    return _core.compile(graph or model.graph, model.weights, pool, options_of)


def run(executable: _core.Executable, tokens: Any = TOKENS, cache: Any = None) -> np.ndarray:
    """Logits of all rows of one sequence, from its beginning."""
    cache = executable.make_cache(4) if cache is None else cache
    sequence, _ = cache.create([])
    cache.append(sequence, tokens)
    pages = cache.pages(sequence)
    logits = executable.run(
        token_ids=tokens,
        positions=np.arange(len(tokens)),
        qo_indptr=[0, len(tokens)],
        kv_indptr=[0, len(pages)],
        kv_indices=pages,
        kv_len=[len(tokens)],
        logit_rows=np.arange(len(tokens)),
        cache=cache,
        phase="prefill",
    )
    cache.release(sequence, False)
    return logits


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_a_model_without_a_layer_is_one_whose_layer_adds_nothing(models, name):
    """The same graph with the skipped layer's output projections (and their norms) set to zero."""
    model = models[name]
    skipped = num_layers(model.graph) - 2
    silent = _core.LayeredWeights(model.weights)
    ends = {"attn_output", "ffn_down", "post_attention_norm", "post_ffw_norm"}
    for weight in model.graph.weight_names:
        if weight.startswith(f"blk.{skipped}.") and weight.split(".")[2] in ends:
            shape = model.weights.shape(weight)
            silent.add(weight, np.zeros(shape, np.float32), "f32", list(shape))
    graph = _retyped(model.graph, silent)
    expected = run(build(replace(model, weights=silent), graph))
    got = run(build(model, SkipLayers([skipped]).apply(model.graph)))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    assert not np.array_equal(got, run(build(model)))


def _retyped(graph: Any, weights: Any) -> Any:
    """The graph with the types that its weights have in another source."""
    builder, values = GraphBuilder(graph.name), {}
    for key, value in graph.metadata.items():
        builder.set_metadata(key, value)
    made = {name for node in graph.nodes for name in node["outputs"]}
    for name, facts in graph.values.items():
        weight = facts["weight_name"]
        if name in made:
            continue
        if weight:
            values[name] = builder.weight(weight, weights.dtype(weight), weights.shape(weight))
        else:
            values[name] = builder.input(name, facts["dtype"], facts["shape"])
    for node in graph.nodes:
        inputs = [values[name] for name in node["inputs"]]
        values[node["outputs"][0]] = builder.node(node["op"], *inputs, **node["attributes"])
    return builder.finish(*(values[name] for name in graph.outputs))


def test_an_early_exit_skips_what_follows(models):
    model = models["llama"]
    got = EarlyExit(1).apply(model.graph)
    assert got.to_string() == SkipLayers([1, 2]).apply(model.graph).to_string()
    assert not any(name.startswith(("blk.1.", "blk.2.")) for name in got.weight_names)
    for wrong in (0, 3, -1):
        with pytest.raises(effinfer.InvalidArgumentError, match=r"expected 1\.\.2"):
            EarlyExit(wrong).apply(model.graph)
    with pytest.raises(effinfer.InvalidArgumentError, match=r"layers of 0\.\.2, got 7"):
        SkipLayers([7]).apply(model.graph)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("precision", ["f32", "fast"])
def test_hidden_states_are_returned_and_logits_stay(models, name, precision):
    model = models[name]
    layers = num_layers(model.graph)
    graph = with_hidden_states(model.graph, range(layers))
    executable = build(model, graph, precision=precision)
    assert executable.output_names == [f"hidden.{layer}" for layer in range(layers)]
    assert _core.Graph.parse(graph.to_string()).to_string() == graph.to_string()
    logits = run(executable)
    plain = build(model, precision=precision)
    np.testing.assert_array_equal(logits, run(plain))
    # What a layer leaves is what a model that ends there feeds its last norm.
    for layer in range(layers - 1):
        short = with_hidden_states(EarlyExit(layer + 1).apply(model.graph), [layer])
        ended = build(model, short, precision=precision)
        run(ended)
        states = ended.output(f"hidden.{layer}")
        run(executable)
        np.testing.assert_array_equal(executable.output(f"hidden.{layer}"), states)
    with pytest.raises(effinfer.InvalidArgumentError, match=r"expected hidden\.0, .* got \"x\""):
        executable.output("x")
    with pytest.raises(effinfer.InvalidArgumentError, match="expected none"):
        plain.output("x")
    with pytest.raises(effinfer.InvalidArgumentError, match="layers of"):
        with_hidden_states(model.graph, [99])


def test_a_smaller_head_gives_the_same_logits(models):
    model = models["llama"]
    tokens = sorted(np.random.default_rng(1).choice(tiny.VOCAB_SIZE, 20, replace=False).tolist())
    graph, weights = VocabTrim(tokens).apply(model.graph, model.weights)
    assert graph.metadata[TOKENS_KEY] == tokens
    whole = build(model)
    cut = _core.compile_beside(whole, graph, weights)
    np.testing.assert_array_equal(run(cut), run(whole)[:, tokens])
    assert cut.packed_bytes < whole.packed_bytes / 4
    for wrong in ([], [3, 2], [1, 1]):
        with pytest.raises(effinfer.InvalidArgumentError, match="rising order"):
            VocabTrim(wrong).apply(model.graph, model.weights)
    with pytest.raises(effinfer.InvalidArgumentError, match="rows: expected"):
        VocabTrim([tiny.VOCAB_SIZE]).apply(model.graph, model.weights)
    texts = ["b a a", "a b c"]
    assert VocabTrim.of_texts(texts, lambda t: [ord(c) for c in t if c != " "], 2).tokens == [
        97,
        98,
    ]


@pytest.mark.parametrize("precision", ["f32", "fast"])
def test_graphs_over_one_set_of_weights_give_the_same_bits(models, precision):
    model = models["gemma3"]
    whole = build(model, precision=precision)
    graph = SkipLayers([2, 3]).apply(model.graph)
    beside = _core.compile_beside(whole, graph)
    alone = build(model, graph, precision=precision)
    assert beside.packed_bytes == 0 < alone.packed_bytes
    expected = run(alone)
    logits = run(whole)
    for _ in range(2):
        np.testing.assert_array_equal(run(beside), expected)
        np.testing.assert_array_equal(run(whole), logits)
    # Over one cache, too: the smaller graph needs fewer of its layers.
    cache = whole.make_cache(8)
    np.testing.assert_array_equal(run(beside, cache=cache), expected)
    np.testing.assert_array_equal(run(whole, cache=cache), logits)


def test_a_weight_of_the_same_name_is_another_one(models):
    """Two sources: what differs is packed anew."""
    model = models["llama"]
    whole = build(model)
    other = _core.LayeredWeights(model.weights)
    name = "blk.0.ffn_down.weight"
    values = np.ascontiguousarray(model.weights.dequantize(name) * 2)
    other.add(name, values, "f32", list(values.shape))
    graph = _retyped(model.graph, other)
    beside = _core.compile_beside(whole, graph, other)
    assert beside.packed_bytes > 0
    assert not np.array_equal(run(beside), run(whole))


def test_a_second_graph_adds_at_most_two_percent() -> None:
    """Of the packed weights, beside its own; SmolLM2."""
    import resource

    model = open_model(smollm2_path())
    whole = build(model, precision="fast", max_tokens=512)
    tokens = np.arange(100, 160)
    run(whole, tokens, whole.make_cache(8))

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    before = resident()
    beside = _core.compile_beside(whole, EarlyExit(8).apply(model.graph))
    added = resident() - before
    assert beside.packed_bytes == 0
    assert beside.arena_bytes <= whole.arena_bytes
    assert added <= 0.02 * whole.packed_bytes
    run(beside, tokens, whole.make_cache(8))

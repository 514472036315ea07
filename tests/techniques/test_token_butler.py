"""TokenButler: what a predictor in the graph makes, and what it is worth on a real model."""

import re
from typing import Any

import numpy as np
import pytest

import effinfer
from effinfer import LLM, SamplingParams, _core
from effinfer.checkpoints.model_files import open_model
from effinfer.techniques import SnapKV, TokenButler
from effinfer.techniques.graph_steps import GraphSteps
from effinfer.techniques.layers import with_hidden_states
from tests.reference import tiny
from tests.techniques.contract_model import long_model
from tests.techniques.predictor_file import write_predictor
from tests.techniques.watching import watching

CONFIG = tiny.FAMILIES["llama"]
LAYERS, KV_HEADS, DIM = 3, 2, 16
FEW = {"budget": 256, "min_tokens": 0, "skip_layers": 0}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return long_model(tmp_path_factory)


def prompt_of(count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(count).integers(0, 200, count).tolist()
    return tokens


def stream_before(path: Any, layer: int, tokens: list[int]) -> np.ndarray:
    files = open_model(path)
    graph = with_hidden_states(files.graph, [layer - 1])
    options = _core.CompileOptions(max_tokens=512, max_rows=64, precision="f32")
    executable = _core.compile(graph, files.weights, _core.ThreadPool(1), options)
    steps = GraphSteps(executable, 512)
    steps.feed(steps.begin(), tokens)
    stream: np.ndarray = executable.output(f"hidden.{layer - 1}").astype(np.float64)
    return stream


@pytest.mark.parametrize(("channels", "first"), [(8, 1), (4, 1), (16, 2), (16, 1)])
def test_layers_more_of_the_cache_hold_what_the_predictor_makes(path, tmp_path, channels, first):
    """Beside numpy in float64, of a model that computes in float32."""
    file = tmp_path / "predictor.gguf"
    weights = write_predictor(file, CONFIG, channels, first)
    more = -(-(LAYERS - first) // (DIM // channels))
    seen: list[np.ndarray] = []

    def look(sequence: Any) -> None:
        assert sequence.num_heads == (LAYERS + more) * KV_HEADS
        heads = range(LAYERS * KV_HEADS, sequence.num_heads)
        seen.append(np.stack([sequence.keys(head) for head in heads]))

    method = TokenButler(**FEW, path=str(file))
    watch = watching(look, when="prompt_end")
    llm = LLM(path, techniques=[method, watch], threads=1, precision="f32")
    llm.generate([prompt_of(90)], SamplingParams(max_tokens=2, ignore_eos=True))
    x = stream_before(path, first, prompt_of(90))
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG["rms_norm_eps"])
    state = x @ weights["key"].T.astype(np.float64)
    state = state / (1 + np.exp(-state))
    for number in range(more):
        keys = (state @ weights[f"{number}.keys"].T).reshape(90, KV_HEADS, DIM)
        got = seen[0][number * KV_HEADS :][:KV_HEADS]
        # Roundings to float32 in two layers and three products, relative to what is summed.
        np.testing.assert_allclose(got, keys.transpose(1, 0, 2), atol=2e-4 * abs(keys).max())


def test_each_layer_has_the_channels_that_are_its_own(path, tmp_path):
    file = tmp_path / "predictor.gguf"
    write_predictor(file, CONFIG, channels=8)
    graph = TokenButler(**FEW, path=str(file)).graph(open_model(path).graph)
    indices = [node["attributes"] for node in graph.nodes if node["op"] == "key_index"]
    assert [(each["of_layer"], each["layer"]) for each in indices] == [(1, 3), (2, 3)]
    assert [each["channels"] for each in indices] == [[*range(8)] * 2, [*range(8, 16)] * 2]
    text = graph.to_string()
    assert _core.Graph.parse(text).to_string() == text
    assert "visits[2, 2]" in text


def test_lists_are_of_the_layer_that_an_index_names(path, tmp_path):
    file = tmp_path / "predictor.gguf"
    write_predictor(file, CONFIG, channels=8)
    text = TokenButler(**FEW, path=str(file)).graph(open_model(path).graph).to_string()
    wrong = text.replace("of_layer = 2", "of_layer = 1").replace("visits[2, 2]", "visits[1, 2]")
    assert wrong != text
    files = open_model(path)
    weights = TokenButler(path=str(file)).extend(files).weights
    with pytest.raises(effinfer.Error, match=r"expected the handle visits\[2, 2\]"):
        _core.compile(_core.Graph.parse(wrong), weights, _core.ThreadPool(1))


def test_predictors_of_something_else_are_refused(path, tmp_path):
    error = effinfer.InvalidArgumentError
    with pytest.raises(error, match=r"\[TokenButler\] path: expected the file of a predictor"):
        LLM(path, techniques=[TokenButler()])
    for key, value in (("kind", "medusa"), ("hidden_size", 32), ("vocab_size", 7)):
        file = tmp_path / f"{key}.gguf"
        write_predictor(file, CONFIG, 8, changed={key: value})
        with pytest.raises(error, match=rf"\[heads\] {re.escape(str(file))}: expected {key}"):
            LLM(path, techniques=[TokenButler(path=str(file))])
    for key, value in (("first", 0), ("first", 3), ("channels", 5), ("channels", 0)):
        file = tmp_path / f"{key}.{value}.gguf"
        write_predictor(file, CONFIG, 8, changed={key: value})
        with pytest.raises(error, match=rf"expected {key} of "):
            LLM(path, techniques=[TokenButler(path=str(file))])
    with pytest.raises(effinfer.FileError):
        LLM(path, techniques=[TokenButler(path=str(tmp_path / "nothing.gguf"))])


def test_methods_that_drop_keys_are_refused_beside_it(path, tmp_path):
    with pytest.raises(effinfer.ConflictError, match="kv.resident"):
        LLM(path, techniques=[TokenButler(), SnapKV()])

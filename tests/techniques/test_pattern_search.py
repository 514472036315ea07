"""MInference's search for patterns: the nearest one of each head."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import effinfer
from effinfer.checkpoints.model_files import open_model
from effinfer.techniques import MInference, SparsePrefill
from effinfer.techniques.minference import PATTERNS
from effinfer.techniques.pattern_search import nearest_patterns
from tests.reference import tiny

IDS = np.random.default_rng(2).integers(0, 200, 1100).tolist()
TEXT = "".join(chr(c) for c in np.random.default_rng(3).integers(97, 123, 1200))


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def path(request, tmp_path_factory):
    config = {**tiny.FAMILIES[request.param], "max_position_embeddings": 2048}
    return tiny.write_gguf(config, tmp_path_factory.mktemp("models") / "tiny.gguf")


@dataclass(frozen=True)
class Only(SparsePrefill):
    """Some heads of each layer see a few keys, the others all."""

    few: tuple[int, ...] = ()

    def indices(self, layer: int, kv_heads: int) -> list[tuple[str, dict[str, Any]]]:
        few = [head for head in self.few if head < kv_heads]
        all_keys = {"columns": 1 << 20, "last_rows": 64}
        if not few:
            return [("column_index", all_keys)]
        return [("column_index", {"local_tokens": 16, "only": few})]


def free_layers(files: Any) -> list[int]:
    return [
        node["attributes"]["layer"]
        for node in files.graph.nodes
        if node["op"] == "attention" and node["attributes"]["window_left"] < 0
    ]


def test_each_head_gets_what_is_nearest_to_all_keys(path):
    files = open_model(path)
    heads = [n["attributes"]["kv_heads"] for n in files.graph.nodes if n["op"] == "attention"][0]
    methods = {"even": Only(few=(1,)), "odd": Only(few=(0,)), "none": Only(few=(0, 1))}
    found = nearest_patterns(methods, files, IDS)
    expected = {
        (layer, head): "even" if head == 0 else "odd"
        for layer in free_layers(files)
        for head in range(heads)
    }
    assert found == expected
    # The first among equals.
    twice = {"a": Only(), "b": Only()}
    assert set(nearest_patterns(twice, files, IDS).values()) == {"a"}


def test_search_names_a_pattern_for_each_head_and_is_not_worse(path):
    llm = effinfer.LLM(path, prefix_cache=False)
    method = MInference(
        vertical_size=8,
        slash_size=8,
        num_blocks=2,
        a_shape_local_tokens=64,
        a_shape_sink_tokens=4,
        local_tokens=8,
        sink_tokens=2,
    )
    found = method.search(llm, TEXT)
    assert replace(found, patterns={}) == method
    assert set(found.patterns.values()) <= set(PATTERNS)
    assert {layer for layer, _ in found.patterns} == set(free_layers(llm.files))
    assert MInference.from_fields({"patterns": [[[0, 0], "a_shape"]]}).patterns == {
        (0, 0): "a_shape"
    }
    effinfer.LLM(path, techniques=[found]).close()


def test_a_short_text_is_refused(path):
    llm = effinfer.LLM(path)
    with pytest.raises(effinfer.InvalidArgumentError, match="at least 1024 tokens, got"):
        MInference().search(llm, TEXT[:100])

"""ActQKV in prompts, on a real model: what its layers choose, and what stays as it is. Generated
tokens are in test_sparse_decode.py."""

from dataclasses import replace

import numpy as np
import pytest

import effinfer
from effinfer.techniques import PREFILLS, ActQKV
from tests.model_files import smollm2_path
from tests.techniques.test_prefill import ANSWER, LENGTH, answer, perplexity, text

LAYERS, ALWAYS = 30, 192


def load(*techniques: effinfer.techniques.Technique) -> effinfer.LLM:
    return effinfer.LLM(
        smollm2_path(),
        techniques=list(techniques),
        max_seq_len=LENGTH + 64,
        max_batch_tokens=600,
        prefix_cache=False,
    )


@pytest.fixture(scope="module")
def dense() -> effinfer.LLM:
    return load()


@pytest.fixture(scope="module")
def method(dense) -> ActQKV:
    begin = dense.detokenize(text(dense)[:500])
    return ActQKV(budget=576, min_tokens=0).calibrate(dense, begin)


@pytest.fixture(scope="module")
def short(dense) -> list[int]:
    """Two steps of a prompt."""
    return text(dense)[:700]


@pytest.fixture(scope="module")
def expected(dense, short) -> np.ndarray:
    return dense.logits(short)


def test_text_stays_as_likely_and_a_fact_is_found(dense, method, short, expected):
    exact, llm = perplexity(dense), load(method)
    sparse = perplexity(llm)
    assert sparse != exact
    assert sparse < 1.05 * exact
    assert ANSWER in answer(llm)
    everything = load(replace(method, budget=1 << 30))
    np.testing.assert_array_equal(everything.logits(short), expected)


def test_blocks_and_generated_tokens_have_the_same_budgets(dense, method):
    graph = method.graph(dense.files.graph)
    nodes = {
        op: [node["attributes"] for node in graph.nodes if node["op"] == op]
        for op in ("block_index", "page_index")
    }
    keys = [[(facts["layer"], facts["keys"]) for facts in each] for each in nodes.values()]
    assert keys[0] == keys[1]
    assert [layer for layer, _ in keys[0]] == list(range(2, LAYERS))
    assert sum(count for _, count in keys[0]) == (LAYERS - 2) * (576 - ALWAYS)
    assert {facts["queries"] for facts in nodes["block_index"]} == {"probe"}


def test_a_share_is_of_both(dense, method):
    graph = replace(method, share=0.25).graph(dense.files.graph)
    indices = [node["attributes"] for node in graph.nodes if node["op"].endswith("_index")]
    assert [facts["share"] for facts in indices] == [0.25] * 2 * (LAYERS - 2)


def test_prompts_of_fewer_than_min_tokens_are_dense(method, short, expected):
    assert (load(method).logits(short) != expected).any()
    few = load(replace(method, min_tokens=701))
    np.testing.assert_array_equal(few.logits(short), expected)


@pytest.mark.parametrize("name", PREFILLS)
def test_it_decides_alone_what_prompts_visit(method, name):
    with pytest.raises(effinfer.ConflictError, match=rf"prefill\.visits.*act_qkv and {name}"):
        load(method, PREFILLS[name]())

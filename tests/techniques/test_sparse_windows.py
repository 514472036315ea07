"""Sparse decodings in layers with a sliding window, whose pages become free behind it: a model of
six windows of 256 keys and a layer without one among them."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from effinfer import LLM, Speculation
from effinfer.techniques import (
    DoubleSparsity,
    InfLLMV2,
    Quest,
    SparseDecode,
    SuffixDecoding,
    TokenSelect,
)
from tests.reference import tiny
from tests.techniques.contract_model import asks, texts

WINDOW = 256
METHODS = [
    Quest(budget=256, min_tokens=0, skip_layers=0),
    Quest(budget=208, unit=16, min_tokens=0, skip_layers=0),
    InfLLMV2(budget=256, local=64, min_tokens=0, skip_layers=0),
    TokenSelect(budget=200, min_tokens=100, skip_layers=0),
    DoubleSparsity(budget=200, min_tokens=0, skip_layers=0, channels=2, labels=(0, 7) * 7),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    sizes = {"sliding_window": WINDOW, "max_position_embeddings": 1024}
    config = {**tiny.FAMILIES["gemma3"], **sizes}
    return tiny.write_gguf(config, tmp_path_factory.mktemp("models") / "tiny.gguf")


def load(path: Any, *techniques: SparseDecode, **options: Any) -> LLM:
    settings: dict[str, Any] = {"threads": 1, "max_batch_tokens": 128, **options}
    return LLM(path, techniques=list(techniques), **settings)


@pytest.fixture(scope="module")
def requests():
    """Of contexts of 1 to 600 keys, drawn so hot that the model, whose head is its embedding, does
    not repeat its last token."""
    rng = np.random.default_rng(4)
    longer = [
        (rng.integers(0, 200, size).tolist(), replace(params, max_tokens=60, temperature=9.0))
        for size, (_, params) in zip((600, 450, 500, 1), asks(4), strict=True)
    ]
    return [*longer, *asks(4)]


@pytest.fixture(scope="module")
def plain(path, requests):
    return texts(load(path, prefix_cache=False), requests)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_text_is_its_own_whoever_shares_the_step(path, requests, plain, method):
    llm = load(path, method, prefix_cache=False)
    nodes = method.graph(load(path).files.graph).nodes
    windows = [node["attributes"]["window_left"] for node in nodes if node["op"].endswith("_index")]
    assert windows == [WINDOW - 1] * 5 + [-1, WINDOW - 1]
    assert llm.engine.kv_cache.num_groups == 2  # the windows' pages become free
    alone = [texts(llm, [each])[0] for each in requests]
    assert alone != plain
    assert texts(llm, requests) == alone
    for options in ({}, {"max_batch_tokens": 300, "threads": 2}, {"max_sequences": 2}):
        again = load(path, method, **options)
        assert texts(again, requests) == alone
        assert texts(again, requests) == alone  # now with what is cached
    few = load(path, method, num_pages=17, max_seq_len=704)
    assert texts(few, requests) == alone
    assert few.engine.stats()["preemptions"] > 0
    drafting = load(path, method, speculation=Speculation([SuffixDecoding()], controller=8))
    assert texts(drafting, requests) == alone


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_a_budget_of_all_keys_has_the_bits_of_plain_decoding(path, requests, plain, method):
    dense = load(path, replace(method, budget=1 << 30))
    assert texts(dense, requests) == plain
    prompt = requests[0][0]
    np.testing.assert_array_equal(dense.logits(prompt), load(path).logits(prompt))

"""KIVI on small models and on SmolLM2: what pages take, who encodes, how near it stays."""

from typing import Any

import numpy as np
import pytest

import effinfer
from effinfer import LLM, SamplingParams, Speculation, _core
from effinfer.techniques import KIVI, SuffixDecoding
from tests.model_files import smollm2_path
from tests.reference import tiny
from tests.techniques.contract_model import long_model


def share(bits: int, head_dim: int) -> float:
    """Of a page's bytes in bf16: codes, two numbers a channel of keys, two a token and block of
    values. Blocks have 64 or 32 dimensions, or what is left."""
    blocks = max(1, head_dim // (64 if bits == 4 else 32))
    ranges = 2 * 2 * (head_dim + 64 * blocks)
    return (2 * 64 * head_dim * bits / 8 + ranges) / (2 * 64 * head_dim * 2)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return long_model(tmp_path_factory)


def greedy(tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **options)


def used_bytes_while_generating(llm: LLM, prompt: list[int], tokens: int) -> list[int]:
    """After each step of one request."""
    engine = llm.engine
    engine.add(prompt, greedy(tokens).to_core())
    used = []
    while engine.has_work():
        engine.step()
        engine.kv_cache.check_integrity()
        used.append(engine.kv_cache.used_bytes)
    return used


@pytest.mark.parametrize("bits", [4, 2])
def test_pages_behind_the_newest_tokens_are_smaller(path, bits):
    llm = LLM(path, techniques=[KIVI(bits=bits, residual=64)], threads=1, prefix_cache=False)
    page = 3 * 2 * 2 * 16 * 64 * 2  # layers, K and V, heads, head_dim, tokens, bf16
    prompt = np.random.default_rng(1).integers(0, 200, 500).tolist()
    used = used_bytes_while_generating(llm, prompt, 80)
    assert used[0] == 8 * page  # the prompt's pages stay as they are
    expected = []
    for fed in range(501, 500 + 80):
        encoded = (fed - 1 - 64) // 64
        expected.append(page * (-(-fed // 64) - encoded + encoded * share(bits, 16)))
    assert used[1:-1] == expected[: len(used) - 2]


def test_drafts_change_no_text(path):
    prompts = [([5, 6, 7, 8, 9] * 80)[: 300 + 13 * i] for i in range(3)]
    technique = KIVI(bits=2, residual=20)
    plain = LLM(path, techniques=[technique], threads=1)
    expected = [plain.generate([p], greedy(150))[0].token_ids for p in prompts]
    speculation = Speculation([SuffixDecoding()], controller=8)
    drafted = LLM(path, techniques=[technique], threads=1, speculation=speculation)
    outputs = drafted.generate(prompts, greedy(150))
    assert [output.token_ids for output in outputs] == expected
    assert sum(output.metrics.speculation.accepted for output in outputs) > 0


def test_prompts_are_cached_for_requests_with_and_without_it(path):
    prompt = np.random.default_rng(2).integers(0, 200, 400).tolist()
    llm = LLM(path, techniques=[KIVI(bits=2, residual=64)], threads=1)
    alone = llm.generate([prompt], greedy(40))[0]
    again = llm.generate([prompt], greedy(40))[0]
    assert again.token_ids == alone.token_ids
    assert again.metrics.cached_tokens == 5 * 64  # where pages are due
    plain = LLM(path, threads=1, prefix_cache=False).generate([prompt], greedy(40))[0]
    off = llm.generate([prompt], greedy(40, techniques=()))[0]
    assert off.token_ids == plain.token_ids
    assert off.metrics.cached_tokens == 5 * 64


def test_layers_with_a_window_keep_their_pages(tmp_path):
    config = {**tiny.FAMILIES["gemma3"], "max_position_embeddings": 1024, "sliding_window": 40}
    files = tiny.write_gguf(config, tmp_path / "gemma3.gguf")
    prompt = np.random.default_rng(3).integers(0, 200, 300).tolist()
    used = {}
    for bits in (0, 4):
        techniques = [] if bits == 0 else [KIVI(bits=bits, residual=0)]
        llm = LLM(files, techniques=techniques, threads=1, prefix_cache=False)
        used[bits] = used_bytes_while_generating(llm, prompt, 4)[1]
    heads, dim = config["num_key_value_heads"], config["head_dim"]
    page = 2 * heads * dim * 64 * 2  # of the one layer of six without a window
    assert used[0] - used[4] == 4 * page * (1 - share(4, dim))


@pytest.mark.parametrize(("option", "error"), [({"kv_dtype": "i8"}, "bf16 or f32, got i8")])
def test_what_it_does_not_support_it_says(path, option, error):
    with pytest.raises(effinfer.UnsupportedError, match=error):
        LLM(path, techniques=[KIVI()], threads=1, **option)


def test_the_option_and_a_technique_exclude_each_other(path):
    files = effinfer.checkpoints.model_files.open_model(path)
    graph = effinfer.techniques.Installed([KIVI()]).graph(files.graph)
    with pytest.raises(effinfer.ConflictError, match="kv_coding"):
        _core.Engine(graph, files.weights, kv_coding=(2, 64))
    engine = _core.Engine(files.graph, files.weights, kv_coding=(2, 0))
    dense = _core.Engine(files.graph, files.weights)
    tokens = np.random.default_rng(4).integers(0, 200, 100).tolist()
    rows = [each.logits(tokens, phase="decode") for each in (engine, dense)]
    np.testing.assert_array_equal(rows[0][:64], rows[1][:64])  # the first page is whole then
    assert not np.array_equal(rows[0][64:], rows[1][64:])


def test_smollm2_predicts_a_text_nearly_as_well():
    """Perplexity of tokens fed one by one behind encoded pages."""
    text = (
        "The mitochondrion is an organelle found in the cells of most eukaryotes. It generates "
        "most of the cell's supply of adenosine triphosphate, which is used as a source of "
        "chemical energy. "
    )
    loss = {}
    for bits in (0, 4, 2):
        techniques = [] if bits == 0 else [KIVI(bits=bits, residual=32)]
        llm = LLM(smollm2_path(), techniques=techniques)
        tokens = llm.tokenize(
            text * 3 + "Python is a language whose programs are easy to read. " * 6
        )
        out = np.asarray(llm.engine.log_likelihoods(tokens[:256], phase="decode"))
        loss[bits] = -float(np.mean(out))
    assert abs(loss[4] - loss[0]) < 0.05
    assert abs(loss[2] - loss[0]) < 0.5
    assert loss[4] != loss[0] != loss[2]

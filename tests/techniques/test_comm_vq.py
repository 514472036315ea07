"""CommVQ: codebooks that commute with rotation, what 2 bits of them are worth on SmolLM2, what is
refused."""

from dataclasses import replace

import numpy as np
import pytest

import effinfer
from effinfer import LLM
from effinfer.checkpoints.model_files import open_model
from effinfer.techniques import KIVI, CommVQ
from effinfer.techniques.codebooks import DIMS, VECTORS, fit, key_order, nearest
from tests.model_files import smollm2_path
from tests.reference import tiny
from tests.techniques.contract_cases import random_codebooks
from tests.techniques.contract_model import long_model
from tests.techniques.fed_text import NAMES, PAGE, page_share, perplexity, text_of


def test_two_bits_of_vectors_are_worth_more_than_two_of_ranges():
    llm = LLM(smollm2_path())
    tokens = llm.tokenize(text_of(NAMES[:4]))[:320]
    other = llm.detokenize(llm.tokenize(text_of(NAMES[40:50]))[:600])
    vectors = CommVQ(residual=0).calibrate(llm, other)
    ranges = KIVI(bits=2, residual=0)
    dense, first, second = (perplexity(each, tokens, PAGE) for each in ([], [vectors], [ranges]))
    assert 0 < first - dense < (second - dense) / 2
    assert page_share(vectors) == pytest.approx(0.125 + 64 / (64 * 64 * 2 * 2))
    assert page_share(vectors) < page_share(ranges)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_vectors_commute_with_the_rotation_of_keys(tmp_path, family):
    """In float64: what a position rotates of a key stays within vectors."""
    graph = open_model(tiny.write_gguf(tiny.FAMILIES[family], tmp_path / "tiny.gguf")).graph
    append = next(node for node in graph.nodes if node["op"] == "kv_append")
    made = {node["outputs"][0]: node for node in graph.nodes}
    rope = made[append["inputs"][0]]
    dim = append["attributes"]["head_dim"]
    turned = made[rope["inputs"][1]]["attributes"]["dims"]
    rotation = np.eye(dim)
    for pair in range(turned // 2):
        interleaved = rope["attributes"]["interleaved"]
        x, y = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + turned // 2)
        cos, sin = np.cos(pair + 0.7), np.sin(pair + 0.7)
        rotation[[x, x, y, y], [x, y, x, y]] = [cos, -sin, sin, cos]
    order = key_order(graph, append)
    assert sorted(order) == list(range(dim))
    blocks = rotation[np.ix_(order, order)].reshape(dim // DIMS, DIMS, dim // DIMS, DIMS)
    own = np.einsum("gigj->gij", blocks)
    assert np.count_nonzero(blocks) == np.count_nonzero(own)
    random = np.random.default_rng(1)
    book, codes = random.normal(size=(dim // DIMS, VECTORS, DIMS)), random.integers(0, VECTORS, 9)
    looked_up = np.stack([book[:, code].ravel() for code in codes])
    turned_book = np.einsum("gij,gcj->gci", own, book)
    np.testing.assert_allclose(
        looked_up @ rotation[np.ix_(order, order)].T,
        np.stack([turned_book[:, code].ravel() for code in codes]),
        atol=1e-12,
    )


def test_fitting_finds_what_vectors_are_like():
    random = np.random.default_rng(2)
    kinds = random.normal(size=(3, 40, DIMS)).astype(np.float32)
    drawn = random.integers(0, 40, size=(900, 3))
    vectors = kinds[np.arange(3), drawn] + 1e-3 * random.normal(size=(900, 3, DIMS))
    centres = fit(vectors.astype(np.float32))
    chosen = nearest(vectors.astype(np.float32), centres)
    distances = ((vectors[:, :, None] - centres[None]) ** 2).sum(-1)
    np.testing.assert_allclose(
        np.take_along_axis(distances, chosen[:, :, None], 2)[:, :, 0], distances.min(-1), atol=1e-5
    )
    assert distances.min(-1).max() < 0.1 * kinds.var()
    # The first token's are its own.
    np.testing.assert_allclose(centres[:, 0], vectors[0], atol=1e-2)


def test_codebooks_of_something_else_are_refused(tmp_path_factory):
    path = long_model(tmp_path_factory)
    books = random_codebooks()

    def refused(technique: CommVQ, said: str) -> None:
        with pytest.raises(effinfer.InvalidArgumentError, match=said):
            LLM(path, threads=1, techniques=[technique])

    refused(CommVQ(codebooks=books[:-1]), "coding.codebooks: expected 49152 numbers")
    refused(CommVQ(codebooks=(0x7F80, *books[1:])), "coding.codebooks: expected finite")
    with pytest.raises(effinfer.InvalidArgumentError, match="at least 256 tokens"):
        llm = LLM(path, threads=1)
        CommVQ().calibrate(llm, llm.detokenize([7] * 20))
    given = CommVQ(residual=0, codebooks=books)
    cache = LLM(path, threads=1, techniques=[given]).engine.kv_cache
    blob = cache.export_sequence(cache.create(list(range(100)))[0])
    other = replace(given, codebooks=(books[0] ^ 1, *books[1:]))
    with pytest.raises(effinfer.InvalidArgumentError, match="import"):
        LLM(path, threads=1, techniques=[other]).engine.kv_cache.import_sequence(blob)

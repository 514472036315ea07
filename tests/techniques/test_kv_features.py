"""CSKV and XKV on SmolLM2: few bytes and what they cost; directions beside numpy's; what is
refused."""

from dataclasses import replace

import numpy as np
import pytest

import effinfer
from effinfer import LLM, SamplingParams
from effinfer.techniques import CSKV, XKV
from effinfer.techniques.channel_basis import directions, fit_bases, pack
from tests.model_files import smollm2_path
from tests.reference import tiny
from tests.techniques.contract_cases import random_basis
from tests.techniques.contract_model import long_model
from tests.techniques.fed_text import NAMES, PAGE, page_share, perplexity, text_of


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(smollm2_path())


@pytest.fixture(scope="module")
def tokens(llm) -> list[int]:
    return llm.tokenize(text_of(NAMES[:4]))[:448]


@pytest.fixture(scope="module")
def other(llm) -> str:
    """Not the text of the tests."""
    return llm.detokenize(llm.tokenize(text_of(NAMES[40:50]))[:1000])


def test_a_fifth_of_the_bytes_costs_five_percent_at_most(llm, tokens, other):
    technique = CSKV(residual=0).calibrate(llm, other)
    dense, kept = (perplexity(each, tokens, PAGE) for each in ([], [technique]))
    assert dense < kept < 1.05 * dense
    assert page_share(technique) < 0.2


def test_layers_that_share_features_lose_less_in_the_same_bytes(llm, tokens, other):
    alone = CSKV(residual=0, features=64).calibrate(llm, other)
    shared = XKV(residual=0, features=192, layers=3).calibrate(llm, other)
    assert page_share(shared) < page_share(alone) < 0.1
    first, second = (perplexity([each], tokens, PAGE) for each in (shared, alone))
    assert first < second


def test_directions_hold_most_of_the_squares():
    random = np.random.default_rng(1)
    numbers = random.normal(size=(300, 4)) @ random.normal(size=(4, 48))
    rows = directions(numbers.astype(np.float32), 4)
    np.testing.assert_allclose(rows @ rows.T, np.eye(4), atol=1e-12)
    np.testing.assert_allclose(numbers @ rows.T @ rows, numbers, atol=1e-5)


def test_numbers_are_packed_as_bfloat16():
    torch = pytest.importorskip("torch")
    numbers = np.random.default_rng(2).normal(size=(3, 8)).astype(np.float32)
    expected = torch.from_numpy(numbers).bfloat16().view(torch.int16).numpy()
    np.testing.assert_array_equal(np.array(pack(numbers)).view(np.int16), expected.ravel())


def test_layers_with_a_window_stay_as_they_are(tmp_path):
    config = {**tiny.FAMILIES["gemma3"], "max_position_embeddings": 1024, "sliding_window": 40}
    path = tiny.write_gguf(config, tmp_path / "gemma3.gguf")
    prompt = np.random.default_rng(3).integers(0, 200, 300).tolist()
    llm = LLM(path, threads=1)
    layers = [n["attributes"] for n in llm.files.graph.nodes if n["op"] == "attention"]
    full = sum(each["window_left"] < 0 for each in layers)
    channels = config["num_key_value_heads"] * config["head_dim"]
    basis = fit_bases(llm.files, prompt, channels)
    assert 0 < full < len(layers) and len(basis) * 4 == full * 2 * channels**2
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    technique = CSKV(features=channels, residual=0, basis=basis)
    encoded = LLM(path, threads=1, techniques=[technique])
    assert encoded.generate([prompt], params)[0].finish_reason == "length"


def test_texts_of_another_basis_are_not_imported(tmp_path_factory):
    path = long_model(tmp_path_factory)
    given = CSKV(features=16, residual=0, basis=random_basis(16, 32))
    others = [
        replace(given, basis=(given.basis[0] ^ 1, *given.basis[1:])),
        replace(given, bits=2),
        XKV(features=16, residual=0, basis=given.basis),
    ]

    def cache_of(technique: CSKV) -> effinfer._core.KvCache:
        return LLM(path, threads=1, techniques=[technique]).engine.kv_cache

    cache = cache_of(given)
    sequence = cache.create(list(range(100)))[0]
    blob = cache.export_sequence(sequence)
    cache_of(given).import_sequence(blob)
    for other in others:
        with pytest.raises(effinfer.InvalidArgumentError, match="import"):
            cache_of(other).import_sequence(blob)


def test_what_no_page_holds_is_refused(tmp_path_factory):
    path = long_model(tmp_path_factory)

    def refused(technique: CSKV, said: str) -> None:
        with pytest.raises(effinfer.InvalidArgumentError, match=said):
            LLM(path, threads=1, techniques=[technique])

    basis = random_basis(16, 32)
    refused(CSKV(features=16), "coding.basis: expected 3072 numbers")
    refused(CSKV(features=16, basis=basis[:-1]), "coding.basis: expected 3072 numbers")
    refused(CSKV(features=24, basis=basis), "coding.features: expected a multiple of 16")
    refused(CSKV(features=48, basis=basis), "at most 32")
    refused(XKV(features=96, layers=2, basis=basis), "at most 64")
    refused(CSKV(features=16, basis=(0x7F80, *basis[1:])), "coding.basis: expected finite")
    llm = LLM(path, threads=1)
    with pytest.raises(effinfer.InvalidArgumentError, match="at least 256 tokens"):
        fit_bases(llm.files, [7] * 255, 16)
    with pytest.raises(effinfer.InvalidArgumentError, match="at most 32"):
        fit_bases(llm.files, [7] * 256, 48)
    with pytest.raises(effinfer.InvalidArgumentError, match="at most 32"):  # the last layer's
        fit_bases(llm.files, [7] * 256, 48, shared_layers=2)

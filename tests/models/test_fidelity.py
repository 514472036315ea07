"""Gemma 3 270M (Q4_K_M) and SmolLM2-135M-Instruct (Q4_1) against the float32 reference over the
dequantised weights."""

from collections.abc import Iterator

import pytest

import effinfer
from tests.models.subject import Subject

# Divergence of llama.cpp's own next-token distributions on these files; its prefill and its
# decoding are equally far. Fast decoding may be as far, fast prefill half as far.
LLAMA_CPP_KL = {"gemma3-270m": 4.7e-3, "smollm2-135m": 2.6e-3}


@pytest.fixture(scope="module", params=LLAMA_CPP_KL)
def subject(request: pytest.FixtureRequest) -> Subject:
    return Subject(request.param, positions=1024)


@pytest.fixture(scope="module")
def exact(subject: Subject) -> Iterator[effinfer.LLM]:
    yield subject.load(precision="f32")


@pytest.fixture(scope="module")
def fast(subject: Subject) -> Iterator[effinfer.LLM]:
    yield subject.load()


def test_greedy_text_is_the_reference_s(subject: Subject, exact: effinfer.LLM) -> None:
    subject.check_greedy(exact)


def test_f32_divergence(subject: Subject, exact: effinfer.LLM) -> None:
    result = subject.fidelity(exact.logits(subject.tokens), "f32")
    assert result.kl_mean < 1e-5
    assert result.perplexity_error < 0.005


def test_fast_prefill_divergence(subject: Subject, fast: effinfer.LLM) -> None:
    result = subject.fidelity(fast.logits(subject.tokens), "fast prefill")
    assert result.kl_mean <= LLAMA_CPP_KL[subject.name] / 2
    assert result.perplexity_error < 0.005


def test_fast_decode_divergence(subject: Subject, fast: effinfer.LLM) -> None:
    result = subject.fidelity(fast.logits(subject.tokens, phase="decode"), "fast decode")
    assert result.kl_mean <= LLAMA_CPP_KL[subject.name]
    assert result.perplexity_error < 0.005

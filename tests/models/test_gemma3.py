"""Gemma 3 270M (Q4_K_M) against the float32 reference over the dequantised weights."""

from collections.abc import Iterator

import pytest

import effinfer
from tests.models.subject import Subject

# Divergence of llama.cpp's own next-token distributions on this file; its prefill and its decoding
# are equally far. Fast decoding may be as far, fast prefill half as far.
LLAMA_CPP_KL = 4.7e-3


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject("gemma3-270m", positions=1024)


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
    assert result.kl_mean <= LLAMA_CPP_KL / 2
    assert result.perplexity_error < 0.005


def test_fast_decode_divergence(subject: Subject, fast: effinfer.LLM) -> None:
    result = subject.fidelity(fast.logits(subject.tokens, phase="decode"), "fast decode")
    assert result.kl_mean <= LLAMA_CPP_KL
    assert result.perplexity_error < 0.005

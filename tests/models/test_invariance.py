"""A text does not depend on what shares its steps, on how its prompt was cut or on what was cached.

SmolLM2 with `precision="f32"` and with `deterministic=True`: whole texts. On the fast path pure
decoding steps: the bits of what the logits become.
"""

from functools import cache
from typing import Any

import pytest

import effinfer
from tests.models.subject import TEXT

NAME = "smollm2-135m"
MODES: dict[str, dict[str, Any]] = {
    "f32": {"precision": "f32"},
    "deterministic": {"deterministic": True},
}
LENGTHS = [1, 3, 17, 64, 65, 130, 31, 200]  # ragged, on and beside the page of 64
NEW_TOKENS = 12


def load(**options: Any) -> effinfer.LLM:
    return effinfer.LLM(NAME, **{"max_seq_len": 512, "num_pages": 64, **options})


@cache
def text_tokens() -> list[int]:
    return load().tokenize(TEXT.read_text())


def ragged_prompts() -> list[list[int]]:
    return [text_tokens()[7 * i : 7 * i + length] for i, length in enumerate(LENGTHS)]


def generate(llm: effinfer.LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = effinfer.SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return [output.token_ids for output in llm.generate(prompts, params)]


@cache
def alone(mode: str) -> list[list[int]]:
    """Each prompt by itself, nothing cached, its prompt in one chunk."""
    llm = load(**MODES[mode], prefix_cache=False)
    return [generate(llm, [prompt])[0] for prompt in ragged_prompts()]


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param


def test_texts_differ(mode: str) -> None:
    assert len({tuple(tokens) for tokens in alone(mode)}) == len(LENGTHS)
    assert all(len(tokens) == NEW_TOKENS for tokens in alone(mode))


def test_batch_of_ragged_prompts(mode: str) -> None:
    assert generate(load(**MODES[mode]), ragged_prompts()) == alone(mode)


@pytest.mark.parametrize("chunk", [1, 5, 16, 17, 33, 64, 130])
def test_chunked_prefill(mode: str, chunk: int) -> None:
    llm = load(**MODES[mode], max_batch_tokens=chunk, prefix_cache=False)
    if chunk == 1:  # slow: the longest prompts add nothing
        assert generate(llm, ragged_prompts()[:4]) == alone(mode)[:4]
    else:
        assert generate(llm, ragged_prompts()) == alone(mode)


def test_prefix_reuse(mode: str) -> None:
    llm = load(**MODES[mode])
    longest = ragged_prompts()[-1]
    params = effinfer.SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    first = llm.generate(longest, params)[0]
    again = llm.generate(longest, params)[0]
    branch = [*longest[:150], *ragged_prompts()[2]]
    branched = llm.generate(branch, params)[0]
    assert first.metrics.cached_tokens == 0
    assert again.metrics.cached_tokens == 192
    assert branched.metrics.cached_tokens == 128
    assert first.token_ids == again.token_ids == alone(mode)[-1]
    fresh = load(**MODES[mode], prefix_cache=False)
    assert branched.token_ids == generate(fresh, [branch])[0]


def test_preemption_loses_nothing(mode: str) -> None:
    # Eight sequences need sixteen pages at the end; with nine some must wait or start again.
    llm = load(**MODES[mode], num_pages=9)
    assert generate(llm, ragged_prompts()) == alone(mode)
    assert llm.engine.stats()["preemptions"] > 0


def test_number_of_threads(mode: str) -> None:
    llm = load(**MODES[mode], threads=1)
    assert generate(llm, ragged_prompts()[:5]) == alone(mode)[:5]


def logprob_bits(llm: effinfer.LLM, prompts: list[list[int]]) -> list[list[Any]]:
    """Tokens and the log probabilities of the best twenty, exactly as computed."""
    params = effinfer.SamplingParams(
        temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=20
    )
    return [
        [output.token_ids, [(step.logprob, step.top) for step in output.logprobs or ()]]
        for output in llm.generate(prompts, params)
    ]


@pytest.mark.parametrize("size", [2, 7, 16])
def test_fast_decoding_is_bit_identical_in_any_batch(size: int) -> None:
    # Every prompt fits into the first step, so that all others decode `size` sequences.
    prompts = [text_tokens()[11 * i : 11 * i + 33 + i] for i in range(size)]
    llm = load(max_batch_tokens=1024, prefix_cache=False)
    together = logprob_bits(llm, prompts)
    assert together == [logprob_bits(llm, [prompt])[0] for prompt in prompts]
    assert len(together[0][1]) == NEW_TOKENS


@pytest.mark.parametrize("top_k", [0, 1, 40, 64])
def test_a_head_that_keeps_the_highest_logits_changes_no_token(top_k: int) -> None:
    """Asking for log-probabilities takes all logits: the tokens are the same without."""
    llm = load()
    assert "head keeps up to 64 of the highest logits" in llm.explain()
    options: dict[str, Any] = (
        {"temperature": 0.9, "top_k": top_k} if top_k else {"temperature": 0.0}
    )

    def texts(**more: Any) -> list[list[int]]:
        params = effinfer.SamplingParams(
            **options, **more, seed=3, max_tokens=NEW_TOKENS, ignore_eos=True
        )
        return [output.token_ids for output in llm.generate(ragged_prompts(), params)]

    assert texts() == texts(logprobs=2)

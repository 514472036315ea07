"""Quest on a real model: what is asked for is found, drafts change no text, and the cache's bounds
stay what its keys are."""

import numpy as np
import pytest

import effinfer
from effinfer import SamplingParams, Speculation
from effinfer.techniques import Quest, SuffixDecoding, TokenRecycling
from tests.model_files import smollm2_path
from tests.techniques.test_prefill import ANSWER, FACT, QUESTION, text

LENGTH = 1200
HALF = Quest(budget=576, min_tokens=0)


def load(*techniques: Quest, **options: object) -> effinfer.LLM:
    settings = {"max_seq_len": LENGTH + 64, "max_batch_tokens": 600, "threads": 1}
    return effinfer.LLM(smollm2_path(), techniques=list(techniques), **{**settings, **options})


@pytest.fixture(scope="module")
def llm() -> effinfer.LLM:
    return load(HALF)


def asking(llm: effinfer.LLM, depth: float) -> list[int]:
    fact, question = (llm.tokenize(part, add_special=False) for part in (FACT, QUESTION))
    hay = text(llm)
    cut = int(LENGTH * depth)
    return [*hay[:cut], *fact, *hay[cut : LENGTH - len(fact) - len(question)], *question]


@pytest.mark.parametrize("depth", [0.2, 0.5, 0.8])
def test_a_fact_is_found_in_half_of_the_keys(llm, depth):
    greedy = SamplingParams(max_tokens=10, temperature=0.0)
    assert ANSWER in llm.generate([asking(llm, depth)], greedy)[0].text
    llm.engine.kv_cache.check_integrity()


def test_generated_text_stays_as_likely(llm):
    tokens = text(llm)[:LENGTH]
    plain = load()

    def likelihood(model: effinfer.LLM) -> float:
        """Of the last 100 tokens, one by one."""
        return float(model.log_likelihoods(tokens, phase="decode")[-100:].mean())

    dense, sparse = likelihood(plain), likelihood(llm)
    assert sparse != dense
    assert sparse > dense - 0.1


@pytest.mark.parametrize("drafter", [SuffixDecoding(), TokenRecycling()], ids=repr)
def test_drafts_change_no_text(llm, drafter):
    prompts = [asking(llm, 0.4), text(llm)[100:700]]
    params = [
        SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=40, temperature=0.7, seed=3, ignore_eos=True),
    ]
    drafting = load(HALF, speculation=Speculation([drafter]))
    expected = [llm.generate([p], q)[0].token_ids for p, q in zip(prompts, params, strict=True)]
    outputs = drafting.generate(prompts, params)
    assert [output.token_ids for output in outputs] == expected
    assert sum(output.metrics.speculation.accepted for output in outputs) > 0
    drafting.engine.kv_cache.check_integrity()


def test_a_budget_of_all_keys_is_plain_decoding(llm):
    tokens = text(llm)[:LENGTH]
    limit, plain = load(Quest(budget=LENGTH + 64, min_tokens=0)), load()
    np.testing.assert_array_equal(limit.logits(tokens), plain.logits(tokens))
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    texts = [each.generate([tokens], params)[0].token_ids for each in (limit, plain)]
    assert texts[0] == texts[1]
    assert "page_index" in llm.explain()

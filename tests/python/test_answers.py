"""Several answers to a prompt, seeds, log-probabilities of prompts, and words as tokens."""

import asyncio
import re

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

import effinfer
from effinfer import LLM, AsyncLLM, SamplingParams
from effinfer.requests.core_params import breaker_tokens, word_tokens
from effinfer.text.tokenizer import Tokenizer
from tests.model_files import smollm2_path
from tests.reference import tiny

PROMPT = "Once upon a time, there was a little"


@pytest.fixture(scope="module")
def llm():
    with LLM(smollm2_path(), max_seq_len=512, threads=1) as llm:
        yield llm


def sampled(seed: int | None = 7, **fields: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "seed": seed, **fields})


# --- seeds ---------------------------------------------------------------------------------------


def test_without_a_seed_equal_prompts_give_different_texts_which_their_seeds_repeat(llm):
    outputs = llm.generate([PROMPT] * 4, SamplingParams(max_tokens=12))
    assert len({output.text for output in outputs}) == 4
    again = llm.generate([PROMPT] * 4, [sampled(output.seed) for output in outputs])
    assert [output.text for output in again] == [output.text for output in outputs]
    assert [output.seed for output in again] == [output.seed for output in outputs]


def test_a_stream_tells_its_seed(llm):
    stream = llm.stream(PROMPT, sampled(None))
    text = "".join(stream)
    assert llm.generate(PROMPT, sampled(stream.output().seed))[0].text == text


# --- n -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"top_k": 20}, {"mirostat": 2}, {"dry_multiplier": 1.0}])
def test_answers_are_those_of_seeds_that_follow_each_other(llm, fields):
    (output,) = llm.generate(PROMPT, sampled(7, n=3, logprobs=1, **fields))
    alone = [llm.generate(PROMPT, sampled(7 + i, logprobs=1, **fields))[0] for i in range(3)]
    assert [answer.text for answer in output.outputs] == [answer.text for answer in alone]
    assert [answer.seed for answer in output.outputs] == [7, 8, 9]
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    # To the bit.
    assert [answer.logprobs for answer in output.outputs] == [answer.logprobs for answer in alone]
    assert output.text == output.outputs[0].text
    assert alone[0].outputs == [alone[0]]
    llm.engine.kv_cache.check_integrity()


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("speculation", [None, "auto"])
def test_answers_to_prompts_of_any_length(prefix_cache, speculation):
    options = {"prefix_cache": prefix_cache, "speculation": speculation, "num_pages": 24}
    rng = np.random.default_rng(3)
    with LLM(smollm2_path(), max_seq_len=512, threads=1, max_sequences=6, **options) as llm:
        prompts = [rng.integers(300, 4000, size).tolist() for size in (1, 63, 64, 65, 130)]
        params = [sampled(20 * i, n=2 + i % 3, max_tokens=9) for i in range(len(prompts))]
        together = llm.generate(prompts, params)
        for prompt, each, output in zip(prompts, params, together, strict=True):
            seeds = range(each.seed, each.seed + each.n)
            texts = [llm.generate([prompt], sampled(s, max_tokens=9))[0].token_ids for s in seeds]
            assert [answer.token_ids for answer in output.outputs] == texts
        cache = llm.engine.kv_cache
        cache.check_integrity()
        assert cache.available_pages == cache.num_pages


def test_each_answer_has_a_grammar_of_its_own(llm):
    params = sampled(3, n=4, regex="(red|green|blue) [0-9]{3}", temperature=1.5, max_tokens=40)
    (output,) = llm.generate(PROMPT, params)
    texts = [answer.text for answer in output.outputs]
    assert all(re.fullmatch("(red|green|blue) [0-9]{3}", text) for text in texts)
    assert len(set(texts)) > 1
    assert {answer.finish_reason for answer in output.outputs} == {"stop"}


def test_a_stop_string_ends_its_answer_alone(llm):
    (free,) = llm.generate(PROMPT, sampled(7, n=3))
    stop = free.outputs[1].text[3:7]
    (output,) = llm.generate(PROMPT, sampled(7, n=3, stop=stop))
    for answer, whole in zip(output.outputs, free.outputs, strict=True):
        assert answer.text == whole.text.split(stop)[0]


def test_a_stream_is_of_one_answer(llm):
    with pytest.raises(effinfer.InvalidArgumentError, match="n: expected 1 for a stream"):
        llm.stream(PROMPT, sampled(n=2))


def test_answers_in_an_event_loop(tmp_path, llm):
    path = tiny.write_gguf(tiny.FAMILIES["llama"], tmp_path / "tiny.gguf")
    params = sampled(5, n=3, ignore_eos=True)
    with LLM(path, threads=1) as plain:
        expected = [answer.text for answer in plain.generate("th", params)[0].outputs]

    async def main() -> None:
        with AsyncLLM(path, threads=1, max_sequences=3, max_waiting=1) as llm:
            (output,) = await llm.generate("th", params)
            assert [answer.text for answer in output.outputs] == expected
            with pytest.raises(effinfer.QueueFullError):
                await llm.generate("th", sampled(n=5))
            with pytest.raises(effinfer.InvalidArgumentError, match="for a stream"):
                llm.stream("th", sampled(n=2))
            task = asyncio.create_task(llm.generate("th", sampled(n=4, max_tokens=100)))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert len((await llm.generate("th", params))[0].outputs) == 3

    asyncio.run(main())


# --- prompt_logprobs -----------------------------------------------------------------------------


@pytest.mark.parametrize("max_batch_tokens", [16, 512])
def test_prompts_are_scored_as_log_likelihoods_does(max_batch_tokens):
    options = {"max_seq_len": 512, "precision": "f32", "threads": 1}
    with LLM(smollm2_path(), max_batch_tokens=max_batch_tokens, **options) as llm:
        for prompt in (PROMPT, PROMPT * 12, [300]):
            ids = llm.tokenize(prompt) if isinstance(prompt, str) else prompt
            llm.generate([ids], sampled())  # the cache now knows it
            params = sampled(prompt_logprobs=2)
            output, nothing = llm.generate(
                [ids, ids], [params, sampled(prompt_logprobs=0, max_tokens=0)]
            )
            want = llm.log_likelihoods(ids)
            for scored in (output, nothing):
                assert scored.prompt_logprobs is not None
                assert scored.prompt_logprobs[0] is None
                got = [entry.logprob for entry in scored.prompt_logprobs[1:]]
                # Sums of float32 logits of up to 40 in another order.
                np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
            logits = llm.logits(ids)
            for row, entry in zip(logits, output.prompt_logprobs[1:], strict=False):
                assert [token for token, _ in entry.top] == np.argsort(-row)[:2].tolist()
            assert nothing.token_ids == [] and nothing.text == ""
            assert nothing.finish_reason == "length"
            assert output.token_ids == llm.generate([ids], sampled())[0].token_ids


def test_the_first_answer_scores_the_prompt(llm):
    (output,) = llm.generate(PROMPT, sampled(7, n=2, prompt_logprobs=0))
    assert len(output.prompt_logprobs) == len(llm.tokenize(PROMPT))
    assert output.outputs[1].prompt_logprobs is None
    texts = [llm.generate(PROMPT, sampled(seed))[0].text for seed in (7, 8)]
    assert [answer.text for answer in output.outputs] == texts


# --- words ---------------------------------------------------------------------------------------


def test_bad_words_do_not_come(llm):
    plain = llm.generate(PROMPT, sampled(temperature=0.0, max_tokens=40))[0].text
    words = [word for word in re.findall("[a-z]+", plain) if len(word) > 3][:6]
    assert words
    text = llm.generate(PROMPT, sampled(temperature=0.0, max_tokens=40, bad_words=words))[0].text
    assert not [word for word in words if re.search(rf"\b{word}\b", text)]


def test_words_are_spelled_with_a_space_and_without(llm):
    found = {llm.detokenize(ids) for ids in word_tokens(llm.tokenizer, "girl")}
    assert found == {"girl", " girl"}
    assert word_tokens(llm.tokenizer, " girl") == word_tokens(llm.tokenizer, "girl")


def test_words_of_a_tokenizer_that_puts_a_space_before_a_text():
    pieces = [("<unk>", -9.0), ("▁bad", -1.0), ("bad", -2.0), ("▁", -3.0), ("\n", -3.0)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    found = word_tokens(Tokenizer(backend), "bad")
    assert [1] in found and [2] in found  # " bad", and "bad" inside a text


def test_breakers_are_the_tokens_that_have_them(llm):
    found = breaker_tokens(llm.tokenizer, ["\n", "sequence breaker"])
    assert found == sorted(found)
    texts = [llm.detokenize([token], skip_special=False) for token in range(llm.vocab_size)]
    having = {token for token, text in enumerate(texts) if "\n" in text}
    last = llm.tokenize("sequence breaker", add_special=False)[-1]
    assert set(found) == having | {last}


def test_dry_ends_a_loop(llm):
    prompt, line = "The cat sat on the mat. " * 6, "The cat sat on the mat."
    greedy = sampled(temperature=0.0, max_tokens=60)
    assert llm.generate(prompt, greedy)[0].text.count(line) > 5
    dry = sampled(temperature=0.0, max_tokens=60, dry_multiplier=0.8)
    assert llm.generate(prompt, dry)[0].text.count(line) == 0


# --- fields --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -1.0},
        {"temperature": "hot"},
        {"top_k": 1.5},
        {"top_p": 1.5},
        {"max_tokens": 0},
        {"max_tokens": "many"},
        {"stop": [""]},
        {"stop": 5},
        {"stop": ["a", 3]},
        {"stop_token_ids": 4},
        {"stop_token_ids": ["a"]},
        {"logit_bias": [1, 2]},
        {"logit_bias": {"a": 1.0}},
        {"logprobs": -1},
        {"prompt_logprobs": -1},
        {"prompt_logprobs": "all"},
        {"seed": -1},
        {"seed": 2**64},
        {"seed": "x"},
        {"n": 0},
        {"n": True},
        {"n": 10**9},
        {"n": 2, "max_tokens": 0, "prompt_logprobs": 1},
        {"bad_words": "word"},
        {"bad_words": [""]},
        {"dry_base": 0.5},
        {"dry_sequence_breakers": [3]},
        {"top_n_sigma": -1.0},
        {"xtc_threshold": 2.0},
        {"mirostat": 3},
        {"ignore_eos": "yes"},
        {"regex": 5},
        {"choices": "word"},
    ],
    ids=str,
)
def test_a_wrong_field_is_named_when_the_object_is_made(fields):
    name = next(iter(fields))
    with pytest.raises(effinfer.InvalidArgumentError, match=rf"\[sampling\] {name}: expected"):
        SamplingParams(**fields)

"""LLM on a real model: prompts, streams, chat, errors, threads."""

import threading
from pathlib import Path

import numpy as np
import pytest

import effinfer
from effinfer import LLM, SamplingParams
from tests.model_files import smollm2_path
from tests.reference import tiny

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
PROMPTS = ["The capital of France is", "Water boils at", "Once upon a time,"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(smollm2_path(), max_seq_len=512, precision="f32")


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory) -> Path:
    return tiny.write_gguf(tiny.FAMILIES["llama"], tmp_path_factory.mktemp("tiny") / "tiny.gguf")


def test_a_batch_gives_what_each_prompt_gives_alone(llm):
    together = llm.generate(PROMPTS, GREEDY)
    alone = [llm.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    assert "Paris" in together[0].text


def test_prompts_may_be_texts_or_ids(llm):
    ids = llm.tokenize(PROMPTS[0])
    forms = [PROMPTS[0], ids, [ids], [PROMPTS[0]], np.array(ids), [np.array(ids)]]
    texts = {llm.generate(form, GREEDY)[0].text for form in forms}
    assert len(texts) == 1
    assert llm.generate([], GREEDY) == []


def test_text_and_ids_agree(llm):
    output = llm.generate(PROMPTS[1], GREEDY)[0]
    assert output.text == llm.detokenize(output.token_ids)
    assert output.finish_reason == "length"
    assert output.metrics.prompt_tokens == len(llm.tokenize(PROMPTS[1]))
    assert output.metrics.output_tokens == len(output.token_ids) == 16
    assert 0 < output.metrics.time_to_first_token_s <= output.metrics.total_s


def test_each_prompt_may_have_its_own_parameters(llm):
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (1, 5, 9)]
    outputs = llm.generate(PROMPTS, params)
    assert [len(output.token_ids) for output in outputs] == [1, 5, 9]
    with pytest.raises(effinfer.InvalidArgumentError, match="params"):
        llm.generate(PROMPTS, params[:2])


def test_a_stream_gives_the_same_text(llm):
    stream = llm.stream(PROMPTS[2], GREEDY)
    assert "".join(stream) == stream.output().text == llm.generate(PROMPTS[2], GREEDY)[0].text


def test_a_stop_string_ends_the_text(llm):
    text = llm.generate(PROMPTS[0], GREEDY)[0].text
    stop = text[6:10]
    output = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, stop=stop))[0]
    assert output.text == text[: text.find(stop)]
    assert output.finish_reason == "stop"


def test_chat_uses_the_models_template(llm):
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = llm.chat_tokens(messages)
    assert "<|im_start|>assistant" in llm.detokenize(ids, skip_special=False)
    output = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=32))
    assert "Paris" in output.text
    streamed = "".join(llm.stream_chat(messages, SamplingParams(temperature=0.0, max_tokens=32)))
    assert streamed == output.text
    # Another template, given by the caller.
    own = LLM(smollm2_path(), max_seq_len=64, chat_template="{{ messages[0].content }}:")
    assert own.detokenize(own.chat_tokens(messages)) == "What is the capital of France?:"


def test_logits_agree_with_generation(llm):
    ids = llm.tokenize(PROMPTS[0])
    logits = llm.logits(ids)
    assert logits.shape == (len(ids), llm.vocab_size) and logits.dtype == np.float32
    output = llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=1, logprobs=2))[0]
    assert output.token_ids == [int(logits[-1].argmax())]
    shifted = logits[-1].astype(np.float64) - logits[-1].max()
    expected = shifted - np.log(np.exp(shifted).sum())
    assert output.logprobs is not None
    (entry,) = output.logprobs
    assert entry.logprob == pytest.approx(expected[output.token_ids[0]], abs=1e-4)
    assert [token for token, _ in entry.top] == np.argsort(-logits[-1])[:2].tolist()


def test_seeds_decide_the_draws(llm):
    params = [SamplingParams(seed=seed, max_tokens=12) for seed in (1, 2, 1)]
    texts = [output.text for output in llm.generate([PROMPTS[2]] * 3, params)]
    assert texts[0] == texts[2] != texts[1]


def test_threads_may_share_a_model(llm):
    expected = [llm.generate(prompt, GREEDY)[0].text for prompt in PROMPTS]
    texts: dict[int, str] = {}

    def work(index: int) -> None:
        texts[index] = llm.generate(PROMPTS[index % 3], GREEDY)[0].text

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert texts == {index: expected[index % 3] for index in range(6)}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("", "some text"), ([], "some text"), ([10**7], "got 10000000"), ([-1], "got -1")],
)
def test_bad_prompts_are_refused_and_the_engine_goes_on(llm, prompt, message):
    with pytest.raises(effinfer.InvalidArgumentError, match=message):
        llm.generate([PROMPTS[0], prompt], GREEDY)
    with pytest.raises(effinfer.InvalidArgumentError, match=message):
        next(llm.stream(prompt, GREEDY))
    assert "Paris" in llm.generate(PROMPTS[0], GREEDY)[0].text


def test_a_prompt_longer_than_the_context(llm):
    with pytest.raises(effinfer.InvalidArgumentError, match="at most 511 tokens"):
        llm.generate([[5] * 600], GREEDY)
    fits = llm.generate([[5] * 500], SamplingParams(temperature=0.0, ignore_eos=True))[0]
    assert fits.finish_reason == "length"
    assert 1 <= len(fits.token_ids) <= 13


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "tpu"}, ["device", "cpu"]),
        ({"device": "cuda"}, ["device", "CUDA"]),
        ({"precision": "f64"}, ["precision", "fast", "f32"]),
        ({"kv_dtype": "q2"}, ["kv_dtype", "bf16"]),
        ({"temperature": 1}, ["temperature", "precision", "max_seq_len"]),
        ({"threads": 0}, ["threads"]),
        ({"max_seq_len": -1}, ["max_seq_len"]),
        ({"num_pages": 0}, ["num_pages"]),
        ({"disabled_passes": ["fuse_everything"]}, ["fuse_everything"]),
    ],
)
def test_wrong_options_are_named(tiny_path, options, words):
    with pytest.raises(effinfer.InvalidArgumentError) as failure:
        LLM(tiny_path, **options)
    for word in words:
        assert word in str(failure.value)


def test_wrong_models_are_typed_errors(tmp_path):
    with pytest.raises(effinfer.FileError, match=r"missing\.gguf"):
        LLM(tmp_path / "missing.gguf")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(effinfer.FormatError, match=r"empty\.gguf"):
        LLM(tmp_path / "empty.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\xff" * 60)
    with pytest.raises(effinfer.FormatError, match=r"broken\.gguf"):
        LLM(tmp_path / "broken.gguf")


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_every_family_runs_from_both_forms(name, tmp_path):
    config = tiny.FAMILIES[name]
    of_gguf = LLM(tiny.write_gguf(config, tmp_path / "tiny.gguf"), precision="f32")
    of_folder = LLM(tiny.write_folder(config, tmp_path / "folder"), precision="f32")
    np.testing.assert_allclose(
        of_gguf.logits(tiny.TOKEN_IDS), of_folder.logits(tiny.TOKEN_IDS), rtol=1e-4, atol=1e-4
    )
    assert len(of_gguf.generate("the", GREEDY)[0].token_ids) >= 1


def test_explain_and_facts(llm):
    assert "linear" in llm.explain() or "matmul" in llm.explain()
    assert llm.vocab_size == 49152
    assert llm.max_seq_len == 512
    assert llm.threads >= 1
    assert llm.load_s > 0

"""Completions of texts, and the routes that tell about the server."""

from __future__ import annotations

import openai
import pytest

import effinfer
from effinfer import LLM, SamplingParams
from tests.serve.process import Server

PROMPT = "The capital of France is"
PARAMS = SamplingParams(temperature=0.0, max_tokens=12)


def test_a_text_is_continued(server: Server, llm: LLM):
    answer = server.client.completions.create(
        model="smol", prompt=PROMPT, temperature=0, max_tokens=12
    )
    output = llm.generate(PROMPT, PARAMS)[0]
    assert answer.choices[0].text == output.text
    assert answer.choices[0].finish_reason == output.finish_reason
    assert answer.usage.prompt_tokens == len(llm.tokenize(PROMPT))
    streamed = server.client.completions.create(
        model="smol", prompt=llm.tokenize(PROMPT), temperature=0, max_tokens=12, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in streamed) == output.text


def test_several_prompts(server: Server, llm: LLM):
    prompts = [PROMPT, "Water boils at"]
    outputs = llm.generate(prompts, PARAMS)
    for given in (prompts, [llm.tokenize(prompt) for prompt in prompts]):
        answer = server.client.completions.create(
            model="smol", prompt=given, temperature=0, max_tokens=12, n=2
        )
        texts = [choice.text for choice in answer.choices]
        assert texts == [text for output in outputs for text in (output.text, output.text)]
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.usage.prompt_tokens == sum(len(llm.tokenize(prompt)) for prompt in prompts)


@pytest.mark.parametrize("stream", [False, True])
def test_echo(server: Server, llm: LLM, stream: bool):
    answer = server.client.completions.create(
        model="smol", prompt=PROMPT, temperature=0, max_tokens=4, echo=True, stream=stream
    )
    chunks = answer if stream else [answer]
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert text.startswith(PROMPT) and len(text) > len(PROMPT)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(server: Server, llm: LLM, stream: bool):
    answer = server.client.completions.create(
        model="smol", prompt=PROMPT, temperature=0, max_tokens=8, logprobs=3, stream=stream
    )
    chunks = list(answer) if stream else [answer]
    found = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
    tokens = [token for part in found for token in part.tokens]
    offsets = [offset for part in found for offset in part.text_offset]
    text = "".join(chunk.choices[0].text for chunk in chunks)
    assert "".join(tokens) == text
    assert [text[offset : offset + len(t)] for offset, t in zip(offsets, tokens, strict=True)] == (
        tokens
    )
    output = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=8, logprobs=3))[0]
    logprobs = [logprob for part in found for logprob in part.token_logprobs]
    assert logprobs == pytest.approx([entry.logprob for entry in output.logprobs], abs=1e-4)
    assert all(len(top) == 3 for part in found for top in part.top_logprobs)


def test_the_server_tells_about_itself(server: Server):
    assert [model.id for model in server.client.models.list()][0] == "smol"
    assert server.client.models.retrieve("smol").owned_by == "effinfer"
    with server.http as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/version").json() == {"version": effinfer.__version__}


def test_tokens_of_texts(server: Server, llm: LLM):
    with server.http as http:
        tokens = http.post("/tokenize", json={"content": PROMPT}).json()["tokens"]
        assert tokens == llm.tokenize(PROMPT)
        assert http.post("/detokenize", json={"tokens": tokens}).json()["content"] == PROMPT


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("n", "max_tokens"), [(1, 0), (1, 4), (3, 4)])
def test_an_echo_with_logprobs(server: Server, llm: LLM, stream: bool, n: int, max_tokens: int):
    text = "The café — is “open”"
    options = {"echo": True, "logprobs": 2, "n": n, "max_tokens": max_tokens, "seed": 4}
    answer = server.client.completions.create(model="smol", prompt=text, stream=stream, **options)
    choices = [choice for chunk in (answer if stream else [answer]) for choice in chunk.choices]
    wanted = {"n": n, "max_tokens": max_tokens, "seed": 4, "logprobs": 2, "prompt_logprobs": 2}
    (output,) = llm.generate(text, **wanted)
    ids = llm.tokenize(text)
    for index, expected in enumerate(output.outputs):
        parts = [choice for choice in choices if choice.index == index]
        assert "".join(part.text for part in parts) == text + expected.text
        assert parts[-1].finish_reason == expected.finish_reason
        found = [part.logprobs for part in parts if part.logprobs]
        logprobs = [value for part in found for value in part.token_logprobs]
        assert logprobs[0] is None
        scored = [*output.prompt_logprobs[1:], *expected.logprobs]
        assert logprobs[1:] == pytest.approx([entry.logprob for entry in scored], abs=1e-4)
        offsets = [value for part in found for value in part.text_offset]
        assert offsets == sorted(offsets) and offsets[0] == 0
        assert len(offsets) == len(ids) + max_tokens
        assert all(len(top) == 2 for part in found for top in part.top_logprobs if top)
    # Tokens of whole characters lie where they say.
    tokens = found[0].tokens[: len(ids)]
    placed = [(offset, token) for offset, token in zip(offsets, tokens, strict=False)]
    assert all(text[o : o + len(t)] == t for o, t in placed if "\ufffd" not in t)


def test_no_token_is_asked_for_with_an_echo_alone(server: Server):
    create = server.client.completions.create
    answer = create(model="smol", prompt=PROMPT, echo=True, max_tokens=0)
    assert answer.choices[0].text == PROMPT
    assert answer.choices[0].logprobs is None
    assert answer.usage.completion_tokens == 0
    for options in ({}, {"echo": True, "n": 2}):
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            create(model="smol", prompt=PROMPT, max_tokens=0, **options)


SAMPLERS = [
    {"bad_words": ["Paris", "the"]},
    {"dry_multiplier": 0.8, "dry_base": 1.5, "dry_allowed_length": 1, "dry_penalty_last_n": 50},
    {"dry_multiplier": 2.0, "dry_sequence_breakers": ["."]},
    {"top_n_sigma": 1.0},
    {"xtc_probability": 1.0, "xtc_threshold": 0.05},
    {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.2},
]


@pytest.mark.parametrize("fields", SAMPLERS, ids=str)
def test_samplers_by_their_fields(server: Server, llm: LLM, fields: dict):
    answer = server.client.completions.create(
        model="smol", prompt=PROMPT, max_tokens=12, seed=3, n=2, extra_body=fields
    )
    (output,) = llm.generate(PROMPT, max_tokens=12, seed=3, n=2, **fields)
    texts = [choice.text for choice in answer.choices]
    assert texts == [each.text for each in output.outputs]

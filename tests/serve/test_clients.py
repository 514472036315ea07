"""Other clients that speak OpenAI's API: `make test-clients` installs them."""

from __future__ import annotations

import os
from typing import Any

import pytest

from effinfer import LLM, SamplingParams
from tests.serve.process import KEY, Server

MESSAGES = [{"role": "user", "content": "Tell me about the number 7."}]
SCHEMA: dict[str, Any] = {
    "title": "person",
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [1, 20, 300]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "wave",
        "description": "Waves.",
        "parameters": {
            "type": "object",
            "properties": {"mood": {"enum": ["happy", "sad"]}},
            "required": ["mood"],
            "additionalProperties": False,
        },
    },
}


def expected(llm: LLM) -> str:
    return llm.chat(MESSAGES, SamplingParams(seed=3, temperature=0.8, max_tokens=24)).text


def test_langchain(server: Server, llm: LLM):
    langchain = pytest.importorskip("langchain_openai", reason="no langchain-openai")
    options: dict[str, Any] = {"model": "smol", "base_url": f"{server.url}/v1", "max_retries": 0}
    model = langchain.ChatOpenAI(
        **options, api_key=KEY, seed=3, temperature=0.8, max_tokens=24, stream_usage=True
    )
    answer = model.invoke(MESSAGES)
    assert answer.content == expected(llm)
    assert answer.usage_metadata["output_tokens"] == 24
    chunks = list(model.stream(MESSAGES))
    assert "".join(chunk.content for chunk in chunks) == answer.content
    assert sum(c.usage_metadata["output_tokens"] for c in chunks if c.usage_metadata) == 24
    long = langchain.ChatOpenAI(**options, api_key=KEY, seed=3, temperature=0, max_tokens=100)
    person = long.with_structured_output(SCHEMA, method="json_schema").invoke("Who are you?")
    assert person.keys() == {"name", "age"} and person["age"] in (1, 20, 300)
    forced = long.bind_tools([TOOL], tool_choice="wave", parallel_tool_calls=False)
    whole = forced.invoke("Hello!")
    (call,) = whole.tool_calls
    assert call["name"] == "wave" and call["args"]["mood"] in ("happy", "sad")
    joined, *rest = forced.stream("Hello!")
    for chunk in rest:
        joined += chunk
    assert [(each["name"], each["args"]) for each in joined.tool_calls] == [("wave", call["args"])]
    stranger = langchain.ChatOpenAI(**options, api_key="wrong")
    with pytest.raises(Exception, match="expected the API key"):
        stranger.invoke(MESSAGES)


def test_litellm(server: Server, llm: LLM, monkeypatch: pytest.MonkeyPatch):
    # Otherwise the import asks the network for prices.
    monkeypatch.setitem(os.environ, "LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm", reason="no litellm")
    options: dict[str, Any] = {
        "model": "openai/smol",
        "api_base": f"{server.url}/v1",
        "messages": MESSAGES,
        "num_retries": 0,
    }
    sampled = {**options, "api_key": KEY, "seed": 3, "temperature": 0.8, "max_tokens": 24}
    answer = litellm.completion(**sampled)
    assert answer.choices[0].message.content == expected(llm)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 24
    chunks = list(litellm.completion(**sampled, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.choices[0].message.content
    called = litellm.completion(
        **{**sampled, "max_tokens": 100}, tools=[TOOL], tool_choice="required", stream=True
    )
    calls = litellm.stream_chunk_builder(list(called)).choices[0].message.tool_calls
    assert calls and {call.function.name for call in calls} == {"wave"}
    with pytest.raises(litellm.AuthenticationError, match="expected the API key"):
        litellm.completion(**options, api_key="wrong")
    with pytest.raises(litellm.ContextWindowExceededError):
        long = [{"role": "user", "content": "word " * 3000}]
        litellm.completion(**{**sampled, "messages": long})

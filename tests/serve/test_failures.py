"""Requests that fail in the engine."""

from __future__ import annotations

from types import SimpleNamespace

import openai
import pytest

from effinfer.text.chat import missing_template
from tests.scripted_engine import BROKEN
from tests.serve.scripted import ScriptedLLM, with_client

MESSAGES = [{"role": "user", "content": "Hi"}]


def test_a_request_that_fails():
    async def use(client: openai.AsyncOpenAI, _: ScriptedLLM) -> None:
        with pytest.raises(openai.InternalServerError, match="broke"):
            await client.chat.completions.create(model="fake", messages=MESSAGES)
        stream = await client.chat.completions.create(model="fake", messages=MESSAGES, stream=True)
        text = ""
        with pytest.raises(openai.APIError, match="broke"):
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
        assert text == "So far"
        stream = await client.responses.create(model="fake", input="Hi", stream=True)
        events = [event async for event in stream]
        assert events[-1].type == "response.failed"
        assert "broke" in events[-1].response.error.message

    with_client("So far", use, end=BROKEN)


def test_a_model_without_a_template():
    async def use(client: openai.AsyncOpenAI, llm: ScriptedLLM) -> None:
        class Without(SimpleNamespace):
            @property
            def chat_template(self) -> object:
                raise missing_template("/home/me/model.gguf")

        llm._llm = Without(tokenizer=llm.tokenizer, engine=llm.engine)
        with pytest.raises(openai.BadRequestError, match="no chat template") as refused:
            await client.chat.completions.create(model="fake", messages=MESSAGES)
        assert "/home" not in str(refused.value)

    with_client("x", use)


def test_a_template_that_refuses():
    async def use(client: openai.AsyncOpenAI, _: ScriptedLLM) -> None:
        with pytest.raises(openai.BadRequestError, match="no system") as refused:
            await client.chat.completions.create(model="fake", messages=MESSAGES)
        assert refused.value.param == "messages"

    with_client("x", use, "{{ raise_exception('no system messages') }}")


def test_an_engine_that_stopped():
    async def use(client: openai.AsyncOpenAI, llm: ScriptedLLM) -> None:
        llm._thread.failure = "[cuda] gone"
        with pytest.raises(openai.InternalServerError, match="stopped") as stopped:
            await client.chat.completions.create(model="fake", messages=MESSAGES)
        assert stopped.value.status_code == 503

    with_client("x", use)

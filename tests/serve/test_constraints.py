"""What has to be enforced by a grammar goes to SamplingParams, or is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from effinfer.sampling import SamplingParams
from effinfer.serve import sampling
from effinfer.serve.errors import ApiError
from effinfer.serve.prompt import conversation_of
from effinfer.serve.sampling import constraint_of, sampling_params
from effinfer.serve.schemas import ChatBody
from effinfer.serve.served import Served
from tests.serve.scripted import TEMPLATE, ScriptedLLM

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")
]


def body(**fields: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": [{"role": "user", "content": "Hi"}], **fields})


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({}, {}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
        ({"response_format": NAMED}, {"json_schema": SCHEMA}),
        ({"guided_json": '{"type": "array"}'}, {"json_schema": {"type": "array"}}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["yes", "no"]}, {"choices": ["yes", "no"]}),
        ({"guided_grammar": "start: /a/"}, {"grammar": "start: /a/"}),
    ],
)
def test_the_constraint_of_a_body(fields: dict[str, Any], constraint: dict[str, Any]):
    assert constraint_of(body(**fields)) == constraint


def test_there_is_one_constraint():
    with pytest.raises(ApiError, match="one of"):
        constraint_of(body(response_format=NAMED, guided_regex="a"))


@pytest.mark.parametrize(
    ("choice", "parallel", "names", "most"),
    [
        ("required", None, ["f", "g"], None),
        ("required", False, ["f", "g"], 1),
        ({"type": "function", "function": {"name": "g"}}, None, ["g"], None),
    ],
)
def test_calls_that_have_to_be_made(choice: Any, parallel: Any, names: list[str], most: Any):
    async def main() -> None:
        llm = ScriptedLLM("x", TEMPLATE)
        try:
            served = Served(names=["fake"], llm=llm)
            asked = body(tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel)
            conversation = await conversation_of(asked, served)
            schema = conversation.constraint["json_schema"]
            calls = schema["items"]["anyOf"]
            assert [call["properties"]["name"]["const"] for call in calls] == names
            assert calls[0]["properties"]["arguments"] == SCHEMA
            assert (schema["minItems"], schema.get("maxItems")) == (1, most)
            # What such a grammar writes is read as calls.
            text = '[{"name": "g", "arguments": {"a": 1}}]'
            delta = conversation.parser().push(text, final=True)
            assert [(call.name, call.arguments) for call in delta.calls] == [("g", '{"a": 1}')]
        finally:
            llm._thread.close()

    asyncio.run(main())


def test_what_cannot_be_enforced_is_refused(monkeypatch):
    """Free text in place of JSON would be worse than an error."""
    fields = set(SamplingParams.__dataclass_fields__) - {"json_schema"}
    monkeypatch.setattr(sampling, "_KNOWN", fields)
    with pytest.raises(ApiError) as refused:
        sampling_params(
            body(response_format=NAMED), max_tokens=1, logprobs=None, vocab_size=9, constraint={}
        )
    assert refused.value.status == 400 and refused.value.code == "unsupported_parameter"

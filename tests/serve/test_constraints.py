"""What a grammar has to enforce goes to SamplingParams, and answers obey it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import jsonschema
import pytest

from effinfer.serve.errors import ApiError
from effinfer.serve.prompt import conversation_of
from effinfer.serve.sampling import constraint_of
from effinfer.serve.schemas import ChatBody
from effinfer.serve.served import Served
from tests.serve.process import Server, check_error
from tests.serve.scripted import TEMPLATE, ScriptedLLM

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
WRONG_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}
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
            assert [(part.call.name, part.arguments) for part in delta.calls] == [("g", '{"a": 1}')]
        finally:
            llm._thread.close()

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_is_obeyed(server: Server, stream: bool):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    for seed in range(3):
        answer = server.client.chat.completions.create(
            model="smol",
            messages=[{"role": "user", "content": "Who are you?"}],
            temperature=1.5,
            seed=seed,
            max_tokens=200,
            stream=stream,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        )
        chunks = list(answer) if stream else [answer]
        choices = [choice for chunk in chunks for choice in chunk.choices]
        texts = [choice.delta.content if stream else choice.message.content for choice in choices]
        if choices[-1].finish_reason == "stop":
            jsonschema.validate(json.loads("".join(text or "" for text in texts)), schema)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_has_to_be_made(server: Server, stream: bool):
    answer = server.client.chat.completions.create(
        model="smol",
        messages=[{"role": "user", "content": "Hello!"}],
        temperature=0,
        max_tokens=200,
        stream=stream,
        tools=[
            {
                "type": "function",
                "function": {
                    "name": name,
                    "parameters": {
                        "type": "object",
                        "properties": {"mood": {"enum": ["happy", "sad"]}},
                        "required": ["mood"],
                        "additionalProperties": False,
                    },
                },
            }
            for name in ("smile", "wave")
        ],
        tool_choice={"type": "function", "function": {"name": "wave"}},
        parallel_tool_calls=False,
    )
    chunks = list(answer) if stream else [answer]
    parts = [choice.delta if stream else choice.message for c in chunks for choice in c.choices]
    calls = [call for part in parts for call in part.tool_calls or []]
    assert [call.function.name for call in calls if call.id] == ["wave"]
    arguments = "".join(call.function.arguments for call in calls)
    assert json.loads(arguments)["mood"] in ("happy", "sad")
    assert not any(part.content for part in parts)
    assert chunks[-1].choices[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "objekt"}},
                }
            },
            "response_format",
        ),
        ({"guided_regex": "(("}, "guided_regex"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_json": {"type": "objekt"}}, "guided_json"),
        ({"guided_json": "3"}, "guided_json"),
        ({"tools": [WRONG_TOOL], "tool_choice": "required"}, "tools"),
    ],
)
def test_an_impossible_grammar(server: Server, fields: dict[str, Any], param: str):
    with server.http as http:
        asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, **fields}
        check_error(http.post("/v1/chat/completions", json=asked), 400, param)

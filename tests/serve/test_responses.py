"""OpenAI's responses API, through its client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from effinfer import LLM, SamplingParams
from tests.serve.process import Server, check_error
from tests.serve.scripted import TEMPLATE, ScriptedLLM, with_client

QUESTION = "Name the capital of France."  # answered by any arithmetic alike
FORMAT = {"type": "json_schema", "name": "x", "schema": {"enum": ["yes", "no"]}}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


def test_a_response(server: Server, llm: LLM):
    answer = server.client.responses.create(
        model="smol", input=QUESTION, temperature=0, max_output_tokens=32
    )
    messages = [{"role": "user", "content": QUESTION}]
    output = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=32))
    assert answer.output_text == output.text and "Paris" in output.text
    assert (answer.status, answer.object) == ("completed", "response")
    assert answer.usage.output_tokens == len(output.token_ids)
    # What the client got goes back as it is.
    again = server.client.responses.create(
        model="smol",
        instructions="Be brief.",
        input=[*messages, *answer.output, {"role": "user", "content": "Why?"}],
        max_output_tokens=4,
    )
    assert again.status == "incomplete"
    assert again.incomplete_details.reason == "max_output_tokens"


def test_a_response_says_what_was_asked_for(server: Server):
    answer = server.client.responses.create(
        model="smol", input="Well?", max_output_tokens=8, text={"format": FORMAT}
    )
    assert json.loads(answer.output_text) in ("yes", "no")
    assert (answer.text.format.type, answer.text.format.schema_) == (
        "json_schema",
        FORMAT["schema"],
    )
    assert answer.tool_choice == "auto"


def test_a_streamed_response(server: Server):
    options: dict[str, Any] = {"model": "smol", "input": QUESTION, "temperature": 0}
    whole = server.client.responses.create(**options, max_output_tokens=32)
    with server.client.responses.stream(**options, max_output_tokens=32) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == final.output_text == whole.output_text


def test_functions_and_thoughts():
    arguments = {"city": "Oslo"}
    call = json.dumps({"name": "weather", "arguments": arguments})
    tool = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
    says = f"Hm.</think>\n\nLet me see.<tool_call>{call}</tool_call>"
    template = TEMPLATE + "{# <tool_call> #}<think>"

    def check(output: list[Any]) -> None:
        assert [item.type for item in output] == ["reasoning", "message", "function_call"]
        assert output[0].content[0].text == "Hm."
        assert output[1].content[0].text == "Let me see."
        assert (output[2].name, json.loads(output[2].arguments)) == ("weather", arguments)
        assert all(item.status == "completed" for item in output[1:])

    async def use(client: openai.AsyncOpenAI, llm: ScriptedLLM) -> None:
        answer = await client.responses.create(model="fake", input="Hi", tools=[tool])
        check(answer.output)
        async with client.responses.stream(model="fake", input="Hi", tools=[tool]) as stream:
            events = [event async for event in stream]
            check((await stream.get_final_response()).output)
        (done,) = (e for e in events if e.type == "response.function_call_arguments.done")
        parts = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
        assert "".join(parts) == done.arguments
        result = {"type": "function_call_output", "call_id": "x", "output": "Snow"}
        given = [{"role": "user", "content": "Hi"}, *answer.output, result]
        await client.responses.create(model="fake", input=given, tools=[tool])
        assert "assistant: Let me see.\nassistant: \ntool: Snow\n" in llm.prompts[-1]

    with_client(says, use, template)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {**FORMAT, "schema": {"type": "objekt"}}}}, "text.format"),
        ({"input": [{"type": "image"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"truncation": "auto"}, "truncation"),
        ({"temperature": -1}, "temperature"),
        ({"inputs": "x"}, "inputs"),
    ],
)
def test_what_is_refused(server: Server, changes: dict[str, Any], param: str):
    with server.http as http:
        body = {"model": "smol", "input": "Hi", "max_output_tokens": 1, **changes}
        error = check_error(http.post("/v1/responses", json=body), 400, param)
        assert "function." not in error["message"] and "response_format" not in error["message"]


def test_the_page(server: Server):
    """It can be had without the key, and asks for nothing of other sites."""
    with server.http as http:
        http.headers.pop("authorization")
        for path, kind in (("/", "html"), ("/chat.js", "javascript"), ("/chat.css", "css")):
            answer = http.get(path)
            assert answer.status_code == 200 and kind in answer.headers["content-type"]
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert "http://" not in answer.text and "https://" not in answer.text

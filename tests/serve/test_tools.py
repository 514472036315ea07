"""Calls of tools and thoughts, as families of models write them."""

from __future__ import annotations

import json
import random
from typing import Any

import openai
import pytest

from effinfer.serve.parsing import AnswerParser
from effinfer.serve.tools import FORMATS, find_format
from tests.serve.scripted import TEMPLATE, ScriptedLLM, with_client

NAMES = ("weather", "time")
PARIS = {"city": 'Par"is }{', "n": [1, {"a": None}]}
CALL = json.dumps({"name": "weather", "arguments": PARIS})
LLAMA = json.dumps({"name": "weather", "parameters": PARIS})
OTHER = json.dumps({"name": "time", "arguments": {}})
TAGGED = f"<tool_call>\n{CALL}\n</tool_call>"
UNKNOWN = '{"name": "unknown", "parameters": {}}'
BOTH = [("weather", PARIS), ("time", {})]
ONE = BOTH[:1]

# format, text, content, calls
CASES = [
    ("hermes", TAGGED, "", ONE),
    ("hermes", f"Let me see.\n<tool_call>{CALL}</tool_call>", "Let me see.\n", ONE),
    ("hermes", f"{TAGGED}\n<tool_call>\n{OTHER}\n</tool_call>\n", "", BOTH),
    ("hermes", f"<tool_call>\n{CALL}", "", ONE),  # the last tag is left out
    ("hermes", "<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
    ("hermes", "a < b <tool", "a < b <tool", []),
    ("llama3", LLAMA, "", ONE),
    ("llama3", f"<|python_tag|>{LLAMA}; {OTHER}", "", BOTH),
    ("llama3", f" \n{LLAMA}", "", ONE),
    ("llama3", UNKNOWN, UNKNOWN, []),
    ("llama3", '{"answer": 42}', '{"answer": 42}', []),
    ("llama3", "{ not JSON", "{ not JSON", []),
    ("llama3", "It is 5.", "It is 5.", []),
    ("mistral", f"[TOOL_CALLS][{CALL}, {OTHER}]", "", BOTH),
    ("mistral", f"So: [TOOL_CALLS] [{CALL}]", "So: ", ONE),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{json.dumps(PARIS)}[TOOL_CALLS]time{{}}", "", BOTH),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{json.dumps(PARIS)}", "", ONE),
    ("mistral", "[TOOL_CALLS]oops", "[TOOL_CALLS]oops", []),
    ("mistral", "Just [TOOLS]", "Just [TOOLS]", []),
    ("gemma", f"```json\n{CALL}\n```", "", ONE),
    ("gemma", LLAMA, "", ONE),
    ("gemma", f"[{CALL}, {OTHER}]", "", BOTH),
    ("gemma", "```python\nprint(1)\n```", "```python\nprint(1)\n```", []),
    ("gemma", "", "", []),
]  # fmt: skip


def parse(parser: AnswerParser, pieces: list[str]) -> tuple[str, str, list[tuple[str, Any]]]:
    content, reasoning, calls = "", "", []
    for number, piece in enumerate(pieces, 1):
        delta = parser.push(piece, final=number == len(pieces))
        content += delta.content
        reasoning += delta.reasoning
        for part in delta.calls:
            if part.is_first:
                calls.append((part.call.name, ""))
            name, arguments = calls[-1]
            assert name == part.call.name
            calls[-1] = (name, arguments + part.arguments)
            assert part.call.arguments.startswith(calls[-1][1])
    return content, reasoning, calls


def cuts(text: str, random_: random.Random) -> list[str]:
    places = sorted(random_.choices(range(len(text) + 1), k=random_.randrange(12)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_however_the_text_is_cut(name, text, content, calls):
    random_ = random.Random(3)
    for pieces in ([text], list(text) or [""], *(cuts(text, random_) for _ in range(20))):
        parser = AnswerParser(False, FORMATS[name].parser(NAMES))
        found_content, _, found = parse(parser, pieces)
        values = [(name, json.loads(arguments)) for name, arguments in found]
        assert (found_content, values) == (content, calls), pieces
        assert parser.has_calls == bool(calls)


@pytest.mark.parametrize(
    ("text", "is_thinking", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, ("\nHm.\n", "Yes.")),
        ("Hm.</think>Yes.", True, ("Hm.", "Yes.")),
        ("Hm.", True, ("Hm.", "")),
        ("<think>Hm.</thin", False, ("Hm.</thin", "")),
        ("I <think> so.", False, ("", "I <think> so.")),
        ("<thi", False, ("", "<thi")),
    ],
)
def test_thoughts_however_the_text_is_cut(text, is_thinking, expected):
    random_ = random.Random(4)
    for pieces in ([text], list(text), *(cuts(text, random_) for _ in range(20))):
        content, reasoning, _ = parse(AnswerParser(is_thinking, None), pieces)
        assert (reasoning, content.lstrip("\n")) == expected, pieces


def test_the_template_tells_the_format():
    assert find_format("... <tool_call> ...") is FORMATS["hermes"]
    assert find_format("... [TOOL_CALLS] ...") is FORMATS["mistral"]
    assert find_format("... <|eot_id|> ...") is FORMATS["llama3"]
    assert find_format("<start_of_turn>") is FORMATS["gemma"]
    assert find_format("<tool_call>", "mistral") is FORMATS["mistral"]


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in NAMES
]
OPTIONS: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
ENDS = [
    (TEMPLATE + "{# <tool_call> #}", f"So.{TAGGED}<tool_call>{OTHER}</tool_call>"),
    (TEMPLATE + "{# [TOOL_CALLS] #}", f"So.[TOOL_CALLS][{CALL}, {OTHER}]"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "says"), ENDS)
def test_calls_through_the_client(template: str, says: str):
    async def use(client: openai.AsyncOpenAI, _: ScriptedLLM) -> None:
        answer = await client.chat.completions.create(**OPTIONS, tools=TOOLS)
        message = answer.choices[0].message
        calls = [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls]
        assert (message.content, calls) == ("So.", BOTH)
        assert answer.choices[0].finish_reason == "tool_calls"
        stream = await client.chat.completions.create(**OPTIONS, tools=TOOLS, stream=True)
        names, arguments, content = {}, {}, ""
        async for chunk in stream:
            content += chunk.choices[0].delta.content or ""
            for call in chunk.choices[0].delta.tool_calls or []:
                names.setdefault(call.index, call.function.name)
                arguments[call.index] = arguments.get(call.index, "") + call.function.arguments
        assert content == "So."
        assert [(names[i], json.loads(arguments[i])) for i in sorted(names)] == BOTH
        # Without tools, or when they are not to be called, it is text.
        for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            plain = await client.chat.completions.create(**OPTIONS, **options)
            assert plain.choices[0].message.tool_calls is None

    with_client(says, use, template)


@pytest.mark.parametrize(("template", "says"), ENDS)
def test_one_call_at_most(template: str, says: str):
    async def use(client: openai.AsyncOpenAI, _: ScriptedLLM) -> None:
        options = {**OPTIONS, "tools": TOOLS, "parallel_tool_calls": False}
        answer = await client.chat.completions.create(**options)
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ONE[0]
        assert answer.choices[0].finish_reason == "tool_calls"
        stream = await client.chat.completions.create(**options, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        assert {call.index for call in calls} == {0}
        assert json.loads("".join(call.function.arguments for call in calls)) == PARIS

    with_client(says, use, template)


def test_thoughts_through_the_client():
    async def use(client: openai.AsyncOpenAI, _: ScriptedLLM) -> None:
        answer = await client.chat.completions.create(**OPTIONS)
        message = answer.choices[0].message
        assert (message.reasoning_content, message.content) == ("Hm.", "Yes.")
        stream = await client.chat.completions.create(**OPTIONS, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
        thoughts = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        assert thoughts == "Hm."
        assert "".join(delta.content or "" for delta in deltas) == "Yes."

    with_client("Hm.</think>\n\nYes.", use, TEMPLATE + "<think>\n")


def test_calls_and_results_reach_the_template():
    template = (
        "^{{ tools | tojson }}{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}|{% endfor %}"
    )
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
    }
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "Snow"},
    ]

    async def use(client: openai.AsyncOpenAI, llm: ScriptedLLM) -> None:
        await client.chat.completions.create(model="fake", messages=messages, tools=TOOLS)
        (prompt,) = llm.prompts
        assert '"name": "weather"' in prompt
        assert prompt.endswith("system:Be brief.|assistant:Oslo|tool:Snow|")

    with_client("ok", use, template)

"""Calls of tools while the model writes them: fragments that join to the same arguments."""

from __future__ import annotations

import json
import random
import string
import time
from typing import Any

import openai
import pytest

from effinfer.serve.parsing import AnswerParser
from effinfer.serve.tools import FORMATS
from tests.serve.scripted import TEMPLATE, ScriptedLLM, with_client
from tests.serve.test_tools import NAMES, OPTIONS, TOOLS, cuts, parse

FULL = {"text": 'a "quoted" {brace] \\ ü\n', "list": [1, {"deep": [None, True]}], "n": -1.5e3}


def written(name: str, calls: list[tuple[str, str]], random_: random.Random) -> str:
    """Calls with these arguments, as a model of that family writes them."""
    key = "parameters" if name == "llama3" else "arguments"
    objects = [f'{{"name": "{called}", "{key}": {given}}}' for called, given in calls]
    if name == "hermes":
        return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
    if name == "mistral" and random_.random() < 0.5:
        return "".join(f"[TOOL_CALLS]{called}[ARGS]{given}" for called, given in calls)
    listed = f"[{', '.join(objects)}]"
    if name == "mistral":
        return "[TOOL_CALLS]" + listed
    if name == "llama3":
        return "<|python_tag|>" + "; ".join(objects)
    return f"```json\n{listed}\n```" if random_.random() < 0.5 else listed


def random_value(random_: random.Random, depth: int) -> Any:
    kind = random_.randrange(7 if depth else 4)
    if kind < 2:
        letters = string.ascii_letters + string.punctuation + "ü€\U0001f600\n\t "
        return "".join(random_.choices(letters, k=random_.randrange(9)))
    if kind == 2:
        return random_.choice([0, -7, 2.5, 1e30])
    if kind == 3:
        return random_.choice([True, False, None, "", [], {}])
    values = [random_value(random_, depth - 1) for _ in range(random_.randrange(4))]
    return values if kind == 4 else {f"k{i}": value for i, value in enumerate(values)}


@pytest.mark.parametrize("name", FORMATS)
def test_random_calls_cut_at_random(name: str):
    random_ = random.Random(name)
    for _ in range(150):
        calls = []
        for _ in range(random_.randint(1, 3)):
            value = {f"a{i}": random_value(random_, 3) for i in range(random_.randrange(4))}
            given = json.dumps(
                value,
                ensure_ascii=random_.random() < 0.5,
                indent=random_.choice([None, None, 2]),
            )
            calls.append((random_.choice(NAMES), given))
        text = written(name, calls, random_)
        for pieces in ([text], list(text), cuts(text, random_)):
            assert parse(AnswerParser(False, FORMATS[name].parser(NAMES)), pieces) == (
                "", "", calls,
            ), pieces  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_come_as_they_are_written(name: str):
    given = json.dumps(FULL)
    text = written(name, [("weather", given)], random.Random(1))
    begin = text.index(given)
    parser = AnswerParser(False, FORMATS[name].parser(NAMES))
    for place, letter in enumerate(text):
        (part,) = parser.push(letter, final=place + 1 == len(text)).calls or [None]
        is_argument = begin <= place < begin + len(given)
        assert (part is not None) == is_argument, (place, letter)
        if part is not None:
            assert (part.arguments, part.is_first) == (letter, place == begin)


# What models get wrong: format, text, content, calls with arguments as they are written.
WRONG = [
    # Cut off by the most tokens, in arguments and behind them.
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "a', "", [("f", '{"x": "a')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}', "", [("f", '{"x": 1}')]),
    ("hermes", '<tool_call>{"name": "f", "argum', '<tool_call>{"name": "f", "argum', []),
    ("llama3", '{"name": "time", "parameters": {"x"', "", [("time", '{"x"')]),
    ("llama3", '{"name": "tim', '{"name": "tim', []),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"x": [', "", [("f", '{"x": [')]),
    ("mistral", "[TOOL_CALLS]f[AR", "[TOOL_CALLS]f[AR", []),
    # Not JSON: what was called is known, and the client sees what was written.
    ("hermes", '<tool_call>{"name": "f", "arguments": {oops}}</tool_call>', "", [("f", "{oops}")]),
    # Arguments before the name, in a string, after other members, twice.
    ("gemma", '{"arguments": {"x": 1}, "name": "time"}', "", [("time", '{"x": 1}')]),
    ("gemma", '{"name": "time", "arguments": "{\\"x\\": 1}"}', "", [("time", '{"x": 1}')]),
    ("gemma", '{"id": 1e3, "name": "time", "a": [{}], "arguments": {}}', "", [("time", "{}")]),
    (
        "gemma",
        '{"name": "time", "arguments": {}, "parameters": {"x": 1}, "id": "7"}',
        "",
        [("time", "{}")],
    ),
    ("gemma", '{"name": "time", "arguments": [1]}', '{"name": "time", "arguments": [1]}', []),
    ("gemma", '{"name": "time"}', '{"name": "time"}', []),
    ("gemma", '{"name": "time", }', '{"name": "time", }', []),
    ("gemma", '{"name": "\\ud800", "arguments": {}}', '{"name": "\\ud800", "arguments": {}}', []),
    ("gemma", "[]", "[]", []),
    ("gemma", "[1] says so", "[1] says so", []),
    # A call, and then something else.
    (
        "gemma",
        '[{"name": "time", "arguments": {}}, {"name": "no", "arguments": {}}]',
        ', {"name": "no", "arguments": {}}]',
        [("time", "{}")],
    ),
    ("gemma", '{"name": "time", "arguments": {}} Done.', " Done.", [("time", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {}}}</tool_call>\n\nDone.',
        "}</tool_call>\n\nDone.",
        [("f", "{}")],
    ),
    (
        "hermes",
        '<tool_call>oops<tool_call>{"name": "f", "arguments": {}}</tool_call> \n Done.',
        "<tool_call>oopsDone.",
        [("f", "{}")],
    ),
    (
        "hermes",  # the tag between them is left out
        '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g", "arguments": {}}',
        "",
        [("f", "{}"), ("g", "{}")],
    ),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": "}</tool_call>So.',
        "So.",
        [("f", '{"x": "}')],
    ),
    (
        "mistral",
        "[TOOL_CALLS]oops [TOOL_CALLS]f{} and so on",
        "[TOOL_CALLS]oops and so on",
        [("f", "{}")],
    ),
    ("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", []),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), WRONG)
def test_what_models_get_wrong(name: str, text: str, content: str, calls: list[Any]):
    random_ = random.Random(5)
    for pieces in ([text], list(text), *(cuts(text, random_) for _ in range(20))):
        parser = AnswerParser(False, FORMATS[name].parser(NAMES))
        assert parse(parser, pieces) == (content, "", calls), pieces


@pytest.mark.parametrize("sign", ["<tool_call>", "[TOOL_CALLS]", "<|eot_id|>", ""])
def test_fragments_through_the_client(sign: str):
    """A client's own join of what it streams is what it gets whole, letter for letter."""
    name = {"<tool_call>": "hermes", "[TOOL_CALLS]": "mistral", "<|eot_id|>": "llama3"}
    given = [("weather", json.dumps(FULL, indent=1)), ("time", '{"zone":  "CET"}')]
    says = written(name.get(sign, "gemma"), given, random.Random(2))
    tools = [{"type": "function", "name": called, "parameters": {}} for called in NAMES]
    # Some versions of the client join streams of strict tools only.
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]

    async def use(client: openai.AsyncOpenAI, llm: ScriptedLLM) -> None:
        engine: Any = llm.engine
        step = engine._step

        def slow_step(outputs: dict[int, Any]) -> None:
            time.sleep(0.002)  # the stream is read meanwhile
            step(outputs)

        answer = await client.chat.completions.create(**OPTIONS, tools=TOOLS)
        calls = answer.choices[0].message.tool_calls
        assert [(call.function.name, call.function.arguments) for call in calls] == given
        engine._step = slow_step
        async with client.chat.completions.stream(**OPTIONS, tools=strict) as stream:
            kinds = [event.type async for event in stream]
            message = (await stream.get_final_completion()).choices[0].message
        joined = [(call.function.name, call.function.arguments) for call in message.tool_calls]
        assert joined == given
        assert kinds.count("tool_calls.function.arguments.delta") > 20
        async with client.responses.stream(model="fake", input="Hi", tools=tools) as stream:
            kinds = [event.type async for event in stream]
            output = (await stream.get_final_response()).output
        assert [(item.name, item.arguments) for item in output] == given
        assert kinds.count("response.function_call_arguments.delta") > 20
        assert kinds.count("response.function_call_arguments.done") == 2

    with_client(says, use, TEMPLATE + "{# " + sign + " #}")

"""What bad input gets: OpenAI's errors, as the exception classes of its client."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import socket
from typing import Any

import httpx
import openai
import pytest

from tests.serve.full import FULL
from tests.serve.process import KEY, Server, check_error

MESSAGES = [{"role": "user", "content": "Hi"}]
CHAT: dict[str, Any] = {"model": "smol", "messages": MESSAGES, "max_tokens": 2}
TEXT: dict[str, Any] = {"model": "smol", "prompt": "Hi", "max_tokens": 2}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def post(server: Server, path: str, body: object) -> httpx.Response:
    with server.http as http:
        return http.post(path, json=body)


def test_the_clients_exception_classes(server: Server):
    create = server.client.chat.completions.create
    with pytest.raises(openai.NotFoundError) as unknown:
        create(**{**CHAT, "model": "gpt-9"})
    assert unknown.value.param == "model" and unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        create(**CHAT, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        create(model="smol", messages=[{"role": "user", "content": "word " * 3000}])
    assert long.value.code == "context_length_exceeded"
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.chat.completions.create(**CHAT)
    with pytest.raises(openai.BadRequestError) as embeddings:
        server.client.embeddings.create(model="smol", input="Hi")
    assert (embeddings.value.param, embeddings.value.code) == ("model", "unsupported")
    assert "no embedding model" in embeddings.value.message


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": ["Hi"]}, "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0]",
        ),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "2"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"stop": [""]}, "stop"),
        ({"stop": {}}, "stop"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "much"}}, "logit_bias.5"),
        ({"stop": ["x"] * 20}, "stop"),
        ({"stop": "x" * 300}, "stop"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web"}]}, "tools[0].type"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token"),
        ({"modalities": ["audio"]}, "modalities[0]"),
        ({"temprature": 1}, "temprature"),
        ({"seed": 2**70}, "seed"),
    ],
)
def test_the_field_is_named(server: Server, changes: dict[str, Any], param: str):
    body = {key: value for key, value in {**CHAT, **changes}.items() if value is not None}
    check_error(post(server, "/v1/chat/completions", body), 400, param)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["Hi", ""]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"prompt": ["Hi"] * 100, "n": 100}, "prompt"),
    ],
)
def test_the_field_of_a_completion_is_named(server: Server, changes: dict[str, Any], param: str):
    check_error(post(server, "/v1/completions", {**TEXT, **changes}), 400, param)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 10**5])
def test_what_is_no_json_object(server: Server, body: bytes):
    with server.http as http:
        headers = {"Content-Type": "application/json"}
        check_error(http.post("/v1/chat/completions", content=body, headers=headers), 400)
        surrogate = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
        check_error(http.post("/v1/chat/completions", content=surrogate, headers=headers), 400)
        # What another site's page could send without asking.
        plain = {"Content-Type": "text/plain"}
        check_error(http.post("/v1/chat/completions", content=b"{}", headers=plain), 400)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/detokenize", {"tokens": ["x"] * 10**6}),
        ("/detokenize", {"tokens": [1] * 10**6}),
        ("/v1/completions", {"prompt": [1.5] * 10**6}),
        ("/v1/completions", {"prompt": ["a"] * 10**6}),
        ("/v1/completions", {"prompt": [1] * 10**6}),
        ("/v1/chat/completions", {"messages": [1] * 10**6}),
        ("/v1/chat/completions", {**CHAT, "logit_bias": {str(i): "x" for i in range(10**5)}}),
        ("/v1/chat/completions", {str(i): 1 for i in range(10**5)}),
    ],
)
def test_a_million_mistakes_are_one_error(server: Server, path: str, body: object):
    error = check_error(post(server, path, body), 400)
    assert len(error["message"]) < 500


def test_other_statuses(server: Server):
    with server.http as http:
        check_error(http.get("/v1/nothing"), 404)
        check_error(http.get("/v1/models/nothing"), 404, "model")
        check_error(http.get("/v1/chat/completions"), 405)
        body = b'{"messages": "' + b"x" * (9 << 20) + b'"}'
        headers = {"Content-Type": "application/json"}
        check_error(http.post("/v1/chat/completions", content=body, headers=headers), 413)
    stranger = httpx.get(f"{server.url}/metrics")
    check_error(stranger, 401)
    assert stranger.headers["www-authenticate"] == "Bearer"
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_text_far_too_long_is_refused_at_once(server: Server):
    for path, field in (("/v1/completions", "prompt"), ("/tokenize", "content")):
        error = check_error(post(server, path, {field: "Hello. " * 10**6}), 400, field)
        assert error["code"] == "context_length_exceeded"


def test_a_full_queue(server: Server):
    """64 run and 64 wait; what comes then is refused, and the others go on."""

    async def one(client: openai.AsyncOpenAI) -> str:
        try:
            await client.completions.create(
                model="smol", prompt="Hi", max_tokens=3, n=32, extra_body={"ignore_eos": True}
            )
        except openai.RateLimitError as error:
            assert error.response.headers["retry-after"] == "1"
            return "refused"
        return "answered"

    async def main() -> list[str]:
        async with server.async_client as client:
            return await asyncio.gather(*(one(client) for _ in range(6)))

    results = asyncio.run(main())
    assert results.count("answered") >= 4 and results.count("refused") >= 1


def mutated(body: Any, random_: random.Random) -> Any:
    """`body` with one place of it replaced, removed or repeated."""
    body = json.loads(json.dumps(body))
    places: list[tuple[Any, Any]] = []

    def visit(value: Any) -> None:
        for key in value if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            if isinstance(value[key], dict | list):
                visit(value[key])

    visit(body)
    holder, key = random_.choice(places)
    kind = random_.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, list):
        holder.insert(0, holder[key])
    elif kind == 2 and isinstance(holder, dict):
        holder[random_.choice(["", "x", "messages", "model", "\u0000", "tools"])] = holder[key]
    else:
        holder[key] = random_.choice(ODD)
    return body


ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2, 1e308, -0.5, 10**30, 2**63, "", "x", "\u0000", "<|im_end|>",
    "\U0010ffff", [], {}, [[]], [None], {"a": None}, [[[[[]]]]], "user", "auto", ["x"] * 20,
    {"type": "object"}, {"type": "text", "text": "x"}, [{"type": "text", "text": "y"}],
]  # fmt: skip
BODIES: list[tuple[str, Any]] = [
    (
        "/v1/chat/completions",
        {
            **CHAT,
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "1",
                            "type": "function",
                            "function": {"name": "f", "arguments": "{}"},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": "2"},
            ],
            "tools": [TOOL],
            "tool_choice": "auto",
            "temperature": 0.5,
            "top_p": 0.9,
            "stop": ["x"],
            "logit_bias": {"5": 1},
            "logprobs": True,
            "top_logprobs": 1,
            "stream": False,
            "seed": 1,
            "n": 1,
            "chat_template_kwargs": {"a": 1},
            "response_format": {"type": "text"},
        },
    ),
    ("/v1/completions", {**TEXT, "prompt": [[1, 2], [3]], "logprobs": 1, "echo": False, "n": 1}),
    ("/v1/completions", {**TEXT, "prompt": ["a", "b"], "stream": True}),
    (
        "/v1/responses",
        {
            "model": "smol",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "2"},
            ],
            "max_output_tokens": 1,
            "tools": [{"type": "function", "name": "f", "parameters": {}}],
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": "low"},
        },
    ),
    ("/tokenize", {"content": "Hi"}),
    ("/detokenize", {"tokens": [1, 2]}),
]


def mutations(count: int) -> list[tuple[str, Any]]:
    random_ = random.Random(1)
    found = []
    for _ in range(count):
        path, body = random_.choice(BODIES)
        for _ in range(random_.randint(1, 3)):
            body = mutated(body, random_) if body else body
        # Without it, the answer is the longest there is.
        most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        if path.startswith("/v1") and body.get(most) is None:
            body = {**body, most: 1}
        found.append((path, body))
    return found


def test_mutated_bodies(server: Server):
    """Always an answer or a typed refusal."""

    async def one(http: httpx.AsyncClient, path: str, body: Any) -> int:
        response = await http.post(path, json=body)
        if response.status_code != 200:
            assert 400 <= response.status_code < 500, (body, response.text)
            check_error(response, response.status_code)
        return response.status_code

    async def main() -> list[int]:
        headers = {"Authorization": f"Bearer {KEY}"}
        statuses: list[int] = []
        bodies = mutations(10_000 if FULL else 1000)
        async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60) as http:
            for begin in range(0, len(bodies), 16):
                batch = (one(http, *body) for body in bodies[begin : begin + 16])
                statuses += await asyncio.gather(*batch)
        return statuses

    statuses = asyncio.run(main())
    assert min(statuses.count(200), statuses.count(400)) > len(statuses) / 10
    assert "Traceback" not in server.log()


def raw_connection(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def seconds_of_an_answer(server: Server) -> float:
    """Of CPUs, in the best of some tries."""
    found = []
    for _ in range(5):
        before = server.cpu_seconds()
        answer = server.client.completions.create(
            model="smol", prompt="Hi", max_tokens=32, temperature=0, extra_body={"ignore_eos": True}
        )
        assert answer.usage.completion_tokens == 32
        found.append(server.cpu_seconds() - before)
    return min(found)


def test_half_sent_bodies_and_silent_connections(server: Server):
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    head += "Content-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    beginnings = [b"", head[:50].encode(), head.encode(), head.encode() + b'{"messages": [']
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    alone = seconds_of_an_answer(server)
    connections = [raw_connection(server) for _ in range(1000)]
    for index, connection in enumerate(connections):
        connection.sendall(beginnings[index % 4])
    assert seconds_of_an_answer(server) < 1.5 * alone
    for connection in connections:
        connection.close()
    with raw_connection(server) as connection:
        connection.sendall(b"\x16\x03\x01 not HTTP\r\n\r\n")
        assert b" 400 " in connection.recv(1000)
    server.wait_until_idle(2)
    assert "Traceback" not in server.log()

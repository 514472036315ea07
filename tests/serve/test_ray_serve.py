"""examples/ray_serve.py: two replicas behind Ray Serve. `make test-ray` installs Ray."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from effinfer import LLM, SamplingParams
from tests.model_files import smollm2_path
from tests.serve.process import KEY

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="no ray")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ray_serve.py"
START_SECONDS = 180
# Longer than what the router knows a text by, and than a page of the cache.
STORIES = [f"Story {number}. " + f"Person {number} went to town. " * 30 for number in range(8)]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    options = ["--model", smollm2_path(), "--alias", "smol", "--max-seq-len", 1024, "--port", port]
    environment = {**os.environ, "EFFINFER_API_KEY": KEY, "RAY_USAGE_STATS_ENABLED": "0"}
    found = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, str(EXAMPLE), *map(str, options)]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            end = time.monotonic() + START_SECONDS
            while not is_ready(found):
                assert process.poll() is None, os.pread(log.fileno(), 1 << 20, 0).decode()
                assert time.monotonic() < end, os.pread(log.fileno(), 1 << 20, 0).decode()
                time.sleep(0.5)
            yield found
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)
        finally:
            process.kill()
            process.wait()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=10).status_code == 200
    except httpx.HTTPError:
        return False


def client_of(url: str, key: str = KEY) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def test_texts_are_those_of_one_process(url: str, llm: LLM):
    questions = [[{"role": "user", "content": f"Tell me about {n}."}] for n in range(8)]
    params = [SamplingParams(seed=seed, max_tokens=16) for seed in range(8)]
    expected = [llm.chat(q, p).text for q, p in zip(questions, params, strict=True)]

    async def one(client: openai.AsyncOpenAI, seed: int) -> str:
        options = {"model": "smol", "messages": questions[seed], "seed": seed, "max_tokens": 16}
        if seed % 2:
            answer = await client.chat.completions.create(**options)
            return str(answer.choices[0].message.content)
        stream = await client.chat.completions.create(**options, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def main() -> list[str]:
        async with client_of(url) as client:
            return await asyncio.gather(*(one(client, seed) for seed in range(8)))

    assert asyncio.run(main()) == expected


def test_a_text_goes_where_its_beginning_is_known(url: str):
    async def one(client: openai.AsyncOpenAI, story: str, end: str) -> tuple[str, int]:
        """(the replica, tokens of the prompt that it had in its cache)"""
        raw = await client.completions.with_raw_response.create(
            model="smol", prompt=story + end, max_tokens=2
        )
        return raw.headers["x-replica"], raw.parse().usage.prompt_tokens_details.cached_tokens

    async def main() -> list[list[tuple[str, int]]]:
        async with client_of(url) as client:
            return [
                await asyncio.gather(*(one(client, story, end) for story in STORIES))
                for end in ("Then", "Then he", "And so")
            ]

    first, *later = asyncio.run(main())
    assert len({replica for replica, _ in first}) == 2, "one replica has all"
    for answers in later:
        assert [replica for replica, _ in answers] == [replica for replica, _ in first]
        assert all(cached >= 64 for _, cached in answers), answers


def test_errors_and_hang_ups(url: str):
    async def running(http: httpx.AsyncClient) -> tuple[str, float]:
        answer = await http.get("/metrics")
        (line,) = (
            x for x in answer.text.splitlines() if x.startswith("effinfer_requests_running ")
        )
        return answer.headers["x-replica"], float(line.split()[1])

    async def main() -> None:
        async with client_of(url, "wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.completions.create(model="smol", prompt="Hi")
        headers = {"Authorization": f"Bearer {KEY}"}
        async with (
            client_of(url) as client,
            httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as http,
        ):
            stream = await client.completions.create(
                model="smol", prompt="Once", max_tokens=900, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            async for _ in stream:
                break
            await stream.close()
            loads: dict[str, float] = {}
            end = time.monotonic() + 5
            while len(loads) < 2 or any(loads.values()):
                replica, load = await running(http)
                loads[replica] = load
                assert time.monotonic() < end, loads

    asyncio.run(main())

"""Clients that go, readers that stop, a server that is told to end."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import openai
import pytest

from tests.serve.full import FULL
from tests.serve.process import KEY, Server, check_error, seconds_in_line

pytestmark = pytest.mark.alone

# Less than a page of 64 tokens with its prompt: the prefix cache keeps nothing of it.
SHORT = {"model": "smol", "prompt": "Once", "max_tokens": 50, "ignore_eos": True}
LONG = {"model": "smol", "prompt": "Once", "max_tokens": 1000, "ignore_eos": True}


class Load(NamedTuple):
    requests: float  # that run or wait
    pages: float  # that are not free


async def load(http: httpx.AsyncClient) -> Load:
    lines = (await http.get("/metrics")).text.splitlines()
    values = dict(line.split() for line in lines if line.startswith(("effinfer_req", "effinfer_p")))
    found = {name.removeprefix("effinfer_"): float(value) for name, value in values.items()}
    return Load(
        found["requests_running"] + found["requests_waiting"],
        found["pages_total"] - found["pages_free"],
    )


IDLE = Load(0, 0)


@pytest.fixture(scope="module")
def fresh() -> Iterator[Server]:
    """A process of this file's own, whose prefix cache is empty."""
    with Server("--alias", "smol") as server:
        yield server


def http_client(server: Server) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60)


@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_connection_gives_its_pages_back(fresh: Server, stream: bool):
    """Within 0.1 s. What other processes take of the CPUs meanwhile is not counted."""
    processes = (fresh.process.pid, os.getpid())

    async def main() -> float:
        async with http_client(fresh) as http, http_client(fresh) as watch:
            body = {**SHORT, "stream": stream}
            task = asyncio.create_task(http.post("/v1/completions", json=body))
            while not (await load(watch)).pages:
                await asyncio.sleep(0.01)
            had_ended = task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            begin, in_line = time.monotonic(), seconds_in_line(*processes)
            while (now := await load(watch)) != IDLE:
                assert time.monotonic() < begin + 10, now
                await asyncio.sleep(0.005)
            seconds = time.monotonic() - begin - (seconds_in_line(*processes) - in_line)
            return math.inf if had_ended else seconds

    assert statistics.median(asyncio.run(main()) for _ in range(5)) < 0.1


def test_many_clients_that_hang_up(fresh: Server):
    """At random moments; 500 of them are no more memory than none."""
    random_ = random.Random(2)
    rounds = 40 if FULL else 10
    # So many run at once as may: pages take memory when they are first used.
    with fresh.http as http:
        http.post("/v1/completions", json={**SHORT, "n": 64}).raise_for_status()

    async def one(http: httpx.AsyncClient) -> None:
        prompt = "Once " * random_.randint(1, 9)
        body = {**SHORT, "stream": random_.random() < 0.5, "prompt": prompt}
        task = asyncio.create_task(http.post("/v1/completions", json=body))
        await asyncio.sleep(random_.random() * 0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def main() -> float:
        """Bytes that the process grew by after the first 100 clients."""
        async with http_client(fresh) as http, http_client(fresh) as watch:
            for number in range(2 + rounds):
                if number == 2:
                    before = fresh.memory()
                await asyncio.gather(*(one(http) for _ in range(50)))
            end = time.monotonic() + 2
            while (now := await load(watch)) != IDLE:
                assert time.monotonic() < end, now
                await asyncio.sleep(0.02)
        return fresh.memory() - before

    assert asyncio.run(main()) < 8e6
    assert "Traceback" not in fresh.log()
    answer = fresh.client.completions.create(model="smol", prompt="Hi", max_tokens=2)
    assert answer.usage.completion_tokens == 2


@pytest.fixture(scope="module")
def small(server: Server):
    """A second process, to be ended."""
    started: list[Server] = []

    def start(*options: object) -> Server:
        started.append(Server(*options))
        return started[-1]

    yield start
    for each in started:
        each.stop(signal.SIGKILL)


def test_running_requests_end_before_the_server_does(small):
    server = small("--drain-seconds", 30, "--log-text")
    texts: list[str] = []

    def ask() -> None:
        stream = server.client.completions.create(
            model="SmolLM2-135M-Instruct.Q4_1",
            prompt="Once",
            max_tokens=60,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        texts.append("".join(chunk.choices[0].text for chunk in stream))

    thread = threading.Thread(target=ask)
    thread.start()
    while not server.metric("requests_running"):
        time.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    while httpx.get(f"{server.url}/health").status_code == 200:
        time.sleep(0.01)
    with server.http as http:
        check_error(http.post("/v1/completions", json={"prompt": "Hi"}), 503)
    thread.join(timeout=60)
    assert len(texts) == 1 and texts[0]
    assert server.process.wait(timeout=30) == 0
    assert "Traceback" not in server.log()
    assert f"text={texts[0]!r}" in server.log()


def test_what_runs_too_long_is_ended(small):
    server = small("--drain-seconds", 0)
    stream = server.client.completions.create(
        model="SmolLM2-135M-Instruct.Q4_1", **{k: v for k, v in LONG.items() if k == "prompt"},
        max_tokens=1000, stream=True, extra_body={"ignore_eos": True},
    )  # fmt: skip
    next(iter(stream))
    server.process.send_signal(signal.SIGINT)
    with pytest.raises(openai.APIError, match="shutting down"):
        _ = [chunk.choices for chunk in stream]
    assert server.process.wait(timeout=30) == 130  # as a shell says of what Ctrl-C ended
    assert "Traceback" not in server.log()


def test_an_address_that_is_taken(fresh: Server):
    port = fresh.url.rpartition(":")[2]
    server = Server("--port", port, ready=False)
    assert server.process.wait(timeout=30) == 1
    lines = server.log().splitlines()
    assert len(lines) <= 3 and "in use" in lines[-1] and "Traceback" not in server.log()


def test_a_model_that_cannot_be_loaded(tmp_path):
    (tmp_path / "no.gguf").write_bytes(b"GGUF but not really")
    server = Server(model=tmp_path / "no.gguf", ready=False)
    assert server.process.wait(timeout=30) == 1
    lines = server.log().splitlines()
    assert len(lines) <= 3 and "no.gguf" in lines[-1] and "Traceback" not in server.log()

"""Clients that go, readers that stop, a server that is told to end."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from pathlib import Path

import httpx
import openai
import pytest

from tests.serve.process import KEY, Server, check_error

LONG = {"model": "smol", "prompt": "Once", "max_tokens": 1000, "ignore_eos": True}


async def running(http: httpx.AsyncClient) -> float:
    lines = (await http.get("/metrics")).text.splitlines()
    return sum(
        float(line.split()[1])
        for line in lines
        if line.startswith(("effinfer_requests_running", "effinfer_requests_waiting"))
    )


def http_client(server: Server) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60)


@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_connection_ends_its_request(server: Server, stream: bool):
    async def main() -> float:
        async with http_client(server) as http, http_client(server) as watch:
            body = {**LONG, "stream": stream}
            task = asyncio.create_task(http.post("/v1/completions", json=body))
            while not await running(watch):
                await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            begin = time.monotonic()
            while await running(watch):
                await asyncio.sleep(0.005)
            return time.monotonic() - begin

    # The goal is 0.1 s on a machine of one's own.
    assert min(asyncio.run(main()) for _ in range(5)) < 0.1


def test_many_clients_that_hang_up(server: Server):
    random_ = random.Random(2)

    async def one(http: httpx.AsyncClient) -> None:
        body = {**LONG, "stream": random_.random() < 0.5, "prompt": "Once " * random_.randint(1, 9)}
        task = asyncio.create_task(http.post("/v1/completions", json=body))
        await asyncio.sleep(random_.random() * 0.2)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def main() -> None:
        async with http_client(server) as http:
            for _ in range(10):
                await asyncio.gather(*(one(http) for _ in range(50)))

    before = memory(server)
    asyncio.run(main())
    server.wait_until_idle(2)
    assert memory(server) - before < 64e6  # page by page, the cache is used for the first time
    assert "Traceback" not in server.log()
    answer = server.client.completions.create(model="smol", prompt="Hi", max_tokens=2)
    assert answer.usage.completion_tokens == 2


def memory(server: Server) -> float:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
    return float(line.split()[1]) * 1024


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
    server = small("--drain-seconds", 30)
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


def test_what_runs_too_long_is_ended(small):
    server = small("--drain-seconds", 0)
    stream = server.client.completions.create(
        model="SmolLM2-135M-Instruct.Q4_1", **{k: v for k, v in LONG.items() if k == "prompt"},
        max_tokens=1000, stream=True, extra_body={"ignore_eos": True},
    )  # fmt: skip
    next(iter(stream))
    server.process.send_signal(signal.SIGTERM)
    with pytest.raises(openai.APIError, match="shutting down"):
        _ = [chunk.choices for chunk in stream]
    assert server.process.wait(timeout=30) == 0
    assert "Traceback" not in server.log()


def test_a_model_that_cannot_be_loaded(tmp_path):
    (tmp_path / "no.gguf").write_bytes(b"GGUF but not really")
    server = Server(model=tmp_path / "no.gguf", ready=False)
    assert server.process.wait(timeout=30) == 1
    lines = server.log().splitlines()
    assert len(lines) <= 3 and "no.gguf" in lines[-1] and "Traceback" not in server.log()

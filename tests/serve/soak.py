"""A server under mixed load for minutes, with too few pages for it: `make soak`.

Afterwards nothing runs, every page can be had, the cache is whole and memory has not grown.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import socket
import sys
from pathlib import Path

import uvicorn

from effinfer.async_llm import AsyncLLM
from effinfer.serve.app import make_app
from effinfer.serve.protocol import impatient_protocol
from effinfer.serve.served import Served
from tests.model_files import smollm2_path

KEY = "secret"
PAGES = 32  # 16 sequences would use 256
MOST_GROWTH = 20e6
WARM_UP_SECONDS = 20.0


def memory() -> float:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
    return float(line.split()[1]) * 1024


async def clients(url: str, seconds: float) -> str:
    """In another process, as they are in life. What they counted."""
    command = [sys.executable, "-m", "tests.serve.soak_clients", url, KEY, str(seconds)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0, "a client got what it should not"
    return output.decode().strip()


async def until_idle(llm: AsyncLLM) -> None:
    for _ in range(200):
        stats = llm.engine.stats()
        if not stats["running"] and not stats["waiting"]:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"requests run that nobody waits for: {llm.engine.stats()}")


async def tell(llm: AsyncLLM) -> None:
    while True:
        await asyncio.sleep(30)
        print(f"soak: {memory() / 1e6:.0f} MB, {llm.engine.stats()}", flush=True)


async def soak(llm: AsyncLLM, seconds: float) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    config = uvicorn.Config(
        make_app(Served(names=["soak"], api_key=KEY, llm=llm)),
        http=impatient_protocol(),
        lifespan="off",
        log_config=None,
    )
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    telling = asyncio.create_task(tell(llm))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    await clients(url, min(WARM_UP_SECONDS, seconds / 2))
    before = memory()
    counts = await clients(url, seconds)
    await until_idle(llm)
    growth = memory() - before
    telling.cancel()
    server.should_exit = True
    await running
    stats, cache = llm.engine.stats(), llm.engine.kv_cache
    print(f"soak: {counts}\nsoak: {stats}, memory {growth / 1e6:+.1f} MB", flush=True)
    cache.check_integrity()
    assert cache.available_pages == PAGES, "pages are lost"
    assert stats["preemptions"] > 0, "there was no pressure on the pages"
    assert growth < MOST_GROWTH, "memory has grown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    options = parser.parse_args()
    with AsyncLLM(
        smollm2_path(), max_seq_len=1024, num_pages=PAGES, max_sequences=16, max_waiting=64
    ) as llm:
        asyncio.run(soak(llm, options.seconds))
    print("soak: passed")


if __name__ == "__main__":
    main()

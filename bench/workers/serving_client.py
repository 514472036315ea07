"""Clients of a server that speaks OpenAI's API: the server is a process that this one starts.

They read events as bytes and look for the little that is measured: the machine's cores are the
server's as well.
"""

import asyncio
import json
import re
import socket
import subprocess
import sys
import time
import urllib.request
from typing import Any

from protocol import serve

HOST = "127.0.0.1"
LOAD_SECONDS = 120
TEXT = re.compile(rb'"text": ?"[^"]')
USAGE = re.compile(rb'"completion_tokens": ?(\d+)')


def command(request: dict[str, Any], port: int) -> list[str]:
    """How the server is started."""
    threads, context = str(request["threads"]), str(request["context"])
    if request["server"] == "effinfer":
        options = ["-m", request["model"], "-t", threads, "--max-seq-len", context]
        return [sys.executable, "-m", "effinfer", "serve", *options, "--port", str(port)]
    options = ["--model", request["model"], "--n_ctx", context, "--flash_attn", "true"]
    options += ["--n_threads", threads, "--n_threads_batch", threads]
    return [request["python"], "-m", "llama_cpp.server", *options, "--port", str(port)]


class Worker:
    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        with socket.create_server((HOST, 0)) as listener:
            self.port = listener.getsockname()[1]
        self.has_usage = request["server"] == "effinfer"
        self.process = subprocess.Popen(command(request, self.port), stdout=sys.stderr)
        end = time.monotonic() + LOAD_SECONDS
        while not self.answers():
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}")
            if time.monotonic() > end:
                raise RuntimeError("the server does not answer")
            time.sleep(0.1)
        return {}

    def answers(self) -> bool:
        path = "/health" if self.has_usage else "/v1/models"
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.port}{path}", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    async def stream(self, prompt: str, count: int) -> tuple[float, int]:
        """(when its first text came, tokens)"""
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "stream": True}
        if self.has_usage:
            body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(HOST, self.port)
        writer.write(head.encode() + data)
        first, answer = 0.0, b""
        while chunk := await reader.read(1 << 16):
            answer += chunk
            if not first and TEXT.search(answer):
                first = time.perf_counter()
        writer.close()
        usage = USAGE.findall(answer)
        tokens = int(usage[-1]) if usage else len(TEXT.findall(answer))
        if not tokens:
            raise RuntimeError(f"no text: {answer[:200]!r}")
        return first, tokens

    async def all(self, prompts: list[str], count: int) -> list[tuple[float, int]]:
        return await asyncio.gather(*(self.stream(prompt, count) for prompt in prompts))

    def streams(self, request: dict[str, Any]) -> dict[str, Any]:
        """{prompts, count} -> {seconds}: of `count` tokens of each, also where a text ended
        before."""
        prompts, count = request["prompts"], request["count"]
        start = time.perf_counter()
        answers = asyncio.run(self.all(prompts, count))
        seconds = time.perf_counter() - start
        return {"seconds": seconds * count * len(prompts) / sum(tokens for _, tokens in answers)}

    def first(self, request: dict[str, Any]) -> dict[str, Any]:
        start = time.perf_counter()
        ((first, _),) = asyncio.run(self.all(request["prompts"][:1], 8))
        return {"seconds": first - start}

    def memory(self, _: dict[str, Any]) -> dict[str, Any]:
        """The server's."""
        with open(f"/proc/{self.process.pid}/status") as status:
            (peak,) = (line.split()[1] for line in status if line.startswith("VmHWM"))
        return {"peak_rss_bytes": int(peak) * 1024}

    def end(self) -> None:
        if hasattr(self, "process"):
            self.process.terminate()
            self.process.wait()


if __name__ == "__main__":
    worker = Worker()
    try:
        serve(
            {
                "load": worker.load,
                "streams": worker.streams,
                "first": worker.first,
                "memory": worker.memory,
            }
        )
    finally:
        worker.end()

"""A server in a process of its own, as a user starts it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.model_files import smollm2_path

KEY = "secret"
_TICKS = os.sysconf("SC_CLK_TCK")
_READY = re.compile(r"serving \S+ on (http://\S+)")


class Server:
    def __init__(self, *options: object, model: Path | None = None, ready: bool = True) -> None:
        command = [sys.executable, "-m", "effinfer", "serve", "-m", model or smollm2_path()]
        command += ["--port", 0, "--max-seq-len", 1024, "-t", 1, *options]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (it lasts as long as the process)
        self.process = subprocess.Popen(
            [str(part) for part in command],
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, "EFFINFER_API_KEY": KEY},
        )
        if ready:
            self.url = self._wait_for_url()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """The exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout=60)
        finally:
            self.process.kill()

    def log(self) -> str:
        return os.pread(self._log.fileno(), 1 << 24, 0).decode()

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)

    @property
    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0)

    @property
    def http(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {KEY}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60)

    def metric(self, name: str) -> float:
        """The sum over labels."""
        with self.http as http:
            lines = http.get("/metrics").text.splitlines()
        values = [line.rsplit(" ", 1) for line in lines if line.startswith(f"effinfer_{name}")]
        return sum(
            float(value) for label, value in values if label.partition("{")[0] == f"effinfer_{name}"
        )

    def cpu_seconds(self) -> float:
        """What all threads of the process have had of the CPUs."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / _TICKS

    def memory(self) -> float:
        """Bytes that are resident."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
        return float(line.split()[1]) * 1024

    def wait_until_idle(self, seconds: float) -> None:
        """Fails unless the engine has no request within `seconds`."""
        end = time.monotonic() + seconds
        while self.metric("requests_running") or self.metric("requests_waiting"):
            assert time.monotonic() < end, "requests run that nobody waits for"
            time.sleep(0.02)

    def _wait_for_url(self) -> str:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            found = _READY.search(self.log())
            if found:
                return found[1]
            assert self.process.poll() is None, self.log()
            time.sleep(0.05)
        raise AssertionError(self.log())


def seconds_in_line(*pids: int) -> float:
    """How long threads of these processes have waited for a CPU that others had, together."""
    waited = 0
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # a thread that has ended
                waited += int(path.read_text().split()[1])
    return waited / 1e9


def check_error(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    """OpenAI's error object, and nothing of the server's insides."""
    assert response.status_code == status, response.text
    error = json.loads(response.text)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and "Traceback" not in error["message"]
    if param is not None:
        assert error["param"] == param, error
    return dict(error)

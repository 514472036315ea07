"""The harness's side of a worker process."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORKERS = Path(__file__).resolve().parent / "workers"


class WorkerError(RuntimeError):
    """The engine reported an error or its process ended."""


@dataclass(frozen=True)
class EngineSpec:
    """How to start one engine: a row of the tables."""

    name: str
    python: Path
    script: str
    environment: dict[str, str] = field(default_factory=dict)
    load_options: dict[str, Any] = field(default_factory=dict)


class Worker:
    """One process of an engine, with one model loaded. A context manager."""

    def __init__(self, spec: EngineSpec, log: Path) -> None:
        self.spec = spec
        self._log_path = log
        self._log = log.open("a")
        self._process = subprocess.Popen(
            [str(spec.python), str(WORKERS / spec.script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **spec.environment},
        )

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            raise WorkerError(f"{command}: process ended with {code}; see {self._log_path.name}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{command}: {answer['error']}")
        return answer

    def load(self, model: Path, threads: int, context: int) -> dict[str, Any]:
        request = {"model": str(model), "threads": threads, "context": context}
        return self.ask("load", **{**request, **self.spec.load_options})

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

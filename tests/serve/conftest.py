"""One server for all tests: a process of `effinfer serve` on a free port of the loopback."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from effinfer import LLM
from tests.model_files import smollm2_path
from tests.serve.process import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with Server("--alias", "smol", "--max-waiting", 64) as server:
        yield server


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """The same model in this process."""
    with LLM(smollm2_path(), max_seq_len=1024, threads=1) as llm:
        yield llm

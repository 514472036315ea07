"""A hot model under schemas of growing difficulty: what it finishes is valid."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import jsonschema
import pytest

from tests.serve.full import FULL
from tests.serve.growing_schemas import LEVELS, PER_LEVEL, growing_schemas
from tests.serve.process import KEY, Server

SCHEMAS = growing_schemas()
SEEDS = range(30) if FULL else range(3)
MAX_TOKENS = 256 if FULL else 96


def test_there_are_fifty():
    assert len(SCHEMAS) == LEVELS * PER_LEVEL == 50
    assert len({json.dumps(schema) for schema in SCHEMAS}) > 45
    for schema in SCHEMAS:
        jsonschema.Draft202012Validator.check_schema(schema)
    sizes = [
        sum(len(json.dumps(s)) for s in SCHEMAS[begin : begin + PER_LEVEL])
        for begin in range(0, 50, PER_LEVEL)
    ]
    assert sizes == sorted(sizes)


def ask(schema: dict[str, Any], seed: int) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "Answer in JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        "temperature": 1.5,
        "seed": seed,
        "max_tokens": MAX_TOKENS,
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_every_finished_answer_is_valid(server: Server, seed: int):
    """All in one batch."""

    async def main() -> list[httpx.Response]:
        headers = {"Authorization": f"Bearer {KEY}"}
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(
            base_url=server.url, headers=headers, timeout=300, limits=limits
        ) as http:
            asked = (http.post("/v1/chat/completions", json=ask(s, seed)) for s in SCHEMAS)
            return await asyncio.gather(*asked)

    finished = 0
    for schema, response in zip(SCHEMAS, asyncio.run(main()), strict=True):
        assert response.status_code == 200, (schema, response.text)
        (choice,) = response.json()["choices"]
        assert choice["finish_reason"] in ("stop", "length")
        if choice["finish_reason"] == "stop":
            finished += 1
            value = json.loads(choice["message"]["content"])
            check = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.Draft202012Validator(schema, format_checker=check).validate(value)
    assert finished >= 30  # others are cut off

"""Clients that ask for all sorts of things, for a while: tests/serve/soak.py starts them."""

from __future__ import annotations

import asyncio
import collections
import json
import random
import sys
import time
from typing import Any

import httpx
import jsonschema

from tests.serve.growing_schemas import growing_schemas

CLIENTS = 24
WORDS = ["the", "sea", "a", "ship", "of", "old", "men", "sailed", "north", "stones", "rained"]
SCHEMAS = growing_schemas()[:24]
# Asked again and again: whatever runs beside it, the answer is the same.
SAME = {"prompt": "Once upon a time", "seed": 5, "max_tokens": 24, "ignore_eos": True}


class Clients:
    def __init__(self, url: str, key: str, seconds: float) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._end = time.monotonic() + seconds
        self._random = random.Random(1)
        self._same: str | None = None
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=120,
            limits=httpx.Limits(max_connections=CLIENTS),
        )

    async def run(self) -> None:
        async with self._http:
            await asyncio.gather(*(self._client() for _ in range(CLIENTS)))

    async def _client(self) -> None:
        kinds = (self._plain, self._plain, self._hang_up, self._schema, self._wrong, self._again)
        while time.monotonic() < self._end:
            kind = self._random.choice(kinds)
            await kind()
            self.counts[kind.__name__[1:]] += 1

    def _text(self) -> str:
        """A few words or many; some begin alike."""
        random_ = random.Random(self._random.randrange(20))
        return " ".join(random_.choices(WORDS, k=self._random.choice([1, 9, 60, 250, 700])))

    def _body(self) -> dict[str, Any]:
        random_ = self._random
        return {
            "prompt": self._text(),
            "max_tokens": random_.choice([1, 8, 40, 200]),
            "n": random_.choice([1, 1, 1, 3]),
            "stream": random_.random() < 0.5,
            "temperature": random_.choice([0, 0.8, 1.5]),
            "logprobs": random_.choice([None, None, 2]),
            "ignore_eos": True,
        }

    async def _plain(self) -> None:
        body = self._body()
        response = await self._http.post("/v1/completions", json=body)
        if self._refused(response):
            return
        if body["stream"]:
            assert response.text.endswith("data: [DONE]\n\n"), response.text[-500:]
            return
        answer = response.json()
        assert len(answer["choices"]) == body["n"]
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}, answer

    async def _hang_up(self) -> None:
        body = {**self._body(), "max_tokens": 900}
        task = asyncio.create_task(self._http.post("/v1/completions", json=body))
        await asyncio.sleep(self._random.random() ** 3 * 3)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _schema(self) -> None:
        schema = self._random.choice(SCHEMAS)
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        body = {
            "messages": [{"role": "user", "content": self._text()}],
            "response_format": form,
            "temperature": 1.5,
            "max_tokens": 64,
        }
        response = await self._http.post("/v1/chat/completions", json=body)
        if self._refused(response):
            return
        (choice,) = response.json()["choices"]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["message"]["content"]), schema)
            self.counts["schemas finished"] += 1

    async def _wrong(self) -> None:
        body = self._random.choice([{}, {"prompt": 3}, {"prompt": "x", "n": 0}, {"promt": "x"}])
        assert (await self._http.post("/v1/completions", json=body)).status_code == 400

    async def _again(self) -> None:
        response = await self._http.post("/v1/completions", json=SAME)
        if self._refused(response):
            return
        text = response.json()["choices"][0]["text"]
        self._same = self._same or text
        assert text == self._same

    def _refused(self, response: httpx.Response) -> bool:
        """Only because the queue is full, or because the words were too many for the context."""
        if response.status_code in (400, 429):
            code = response.json()["error"]["code"]
            assert code in ("queue_full", "context_length_exceeded"), response.text
            self.counts[code] += 1
            return True
        assert response.status_code == 200, response.text
        return False


def main() -> None:
    url, key, seconds = sys.argv[1:]
    clients = Clients(url, key, float(seconds))
    asyncio.run(clients.run())
    print(json.dumps(clients.counts))


if __name__ == "__main__":
    main()

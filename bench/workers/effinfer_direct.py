"""effinfer's LLM in this process, as one who has no server uses it."""

import time
from typing import Any

from protocol import serve

import effinfer


class Worker:
    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        self.llm = effinfer.LLM(
            request["model"], threads=request["threads"], max_seq_len=request["context"]
        )
        return {"version": effinfer.info().version}

    def streams(self, request: dict[str, Any]) -> dict[str, Any]:
        """{prompts, count, schemas?} -> {seconds}: all of the call, prompts included."""
        count, prompts = request["count"], request["prompts"]
        schemas = request.get("schemas") or [None] * len(prompts)
        params = [
            effinfer.SamplingParams(
                temperature=0.0, max_tokens=count, ignore_eos=True, json_schema=schema
            )
            for schema in schemas
        ]
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params)
        seconds = time.perf_counter() - start
        if any(len(output.token_ids) != count for output in outputs):
            raise RuntimeError(f"expected {count} tokens of each")
        return {"seconds": seconds}

    def first(self, request: dict[str, Any]) -> dict[str, Any]:
        """{prompts} -> {seconds}: to the first text of the one prompt."""
        params = effinfer.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        start = time.perf_counter()
        stream = self.llm.stream(request["prompts"][0], params)
        next(iter(stream))
        seconds = time.perf_counter() - start
        stream.close()
        return {"seconds": seconds}


if __name__ == "__main__":
    worker = Worker()
    serve({"load": worker.load, "streams": worker.streams, "first": worker.first})

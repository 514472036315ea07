"""effinfer through its public Python class."""

import time
from typing import Any

import numpy as np
from protocol import serve

import effinfer


class Worker:
    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        start = time.perf_counter()
        self.llm = effinfer.LLM(
            request["model"],
            threads=request["threads"],
            precision=request.get("precision", "fast"),
            max_seq_len=request["context"],
            prefix_cache=False,
        )
        seconds = time.perf_counter() - start
        facts = effinfer.info()
        return {"seconds": seconds, "version": facts.version, "isa": facts.isa}

    def first_and_last(self, tokens: list[int], count: int) -> tuple[float, float]:
        """Seconds from the call to the first and to the last of `count` greedy tokens."""
        params = effinfer.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        engine = self.llm.engine
        times: list[float] = []
        start = time.perf_counter()
        request = engine.add(tokens, params.to_core())
        while engine.has_work():
            produced = sum(len(output.tokens) for output in engine.step())
            times.extend([time.perf_counter() - start] * produced)
        engine.forget(request)
        if len(times) != count:
            raise RuntimeError(f"expected {count} tokens, got {len(times)}")
        return times[0], times[-1]

    def prefill(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"seconds": self.first_and_last(request["tokens"], 1)[0]}

    def decode(self, request: dict[str, Any]) -> dict[str, Any]:
        first, last = self.first_and_last(request["prompt"], request["count"] + 1)
        return {"seconds": last - first}

    def logits(self, request: dict[str, Any]) -> dict[str, Any]:
        np.save(request["path"], self.llm.logits(request["tokens"], phase=request["phase"]))
        return {}

    def tokenize(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": self.llm.tokenize(request["text"])}


if __name__ == "__main__":
    worker = Worker()
    serve(
        {
            "load": worker.load,
            "prefill": worker.prefill,
            "decode": worker.decode,
            "logits": worker.logits,
            "tokenize": worker.tokenize,
        }
    )

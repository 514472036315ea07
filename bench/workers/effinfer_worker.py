"""effinfer through its public Python class. numpy comes with the questions that need it, and is in
no other peak of memory."""

import statistics
import time
from pathlib import Path
from typing import Any

from protocol import serve

import effinfer
from effinfer import _core
from effinfer.checkpoints.model_files import open_model


class Steps:
    """The model's executable, run step by step: the engine decodes one token a sequence."""

    def __init__(self, path: str, threads: int, max_seq_len: int) -> None:
        files = open_model(Path(path))
        options = _core.CompileOptions(max_seq_len=max_seq_len)
        pool = _core.ThreadPool(threads)
        self.executable = _core.compile(files.graph, files.weights, pool, options)
        self.cache = self.executable.make_cache(max_seq_len // 64 + 2)

    def step(self, sequence: int, tokens: list[int], phase: str) -> None:
        """Appends the tokens and computes the logits of all."""
        import numpy as np

        done = self.cache.length(sequence)
        self.cache.append(sequence, tokens)
        pages = np.array(self.cache.pages(sequence), np.int32)
        self.executable.run(
            token_ids=np.array(tokens, np.int32),
            positions=np.arange(done, done + len(tokens), dtype=np.int32),
            qo_indptr=np.array([0, len(tokens)], np.int32),
            kv_indptr=np.array([0, len(pages)], np.int32),
            kv_indices=pages,
            kv_len=np.array([done + len(tokens)], np.int32),
            logit_rows=np.arange(len(tokens), dtype=np.int32),
            cache=self.cache,
            phase=phase,
        )
        self.cache.commit(sequence, len(tokens))

    def median(self, prompt: list[int], tokens: list[int], count: int) -> float:
        sequence, _ = self.cache.create([])
        self.step(sequence, prompt, "prefill")
        times = []
        for _ in range(count):
            start = time.perf_counter()
            self.step(sequence, tokens, "decode")
            times.append(time.perf_counter() - start)
            self.cache.rollback(sequence, len(tokens))
        self.cache.release(sequence, keep_prefix=False)
        return statistics.median(times)


class Worker:
    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        self.path, self.threads = request["model"], request["threads"]
        self.steps: Steps | None = None
        start = time.perf_counter()
        self.llm = effinfer.LLM(
            request["model"],
            threads=request["threads"],
            precision=request.get("precision", "fast"),
            deterministic=request.get("deterministic", False),
            kv_dtype=request.get("kv_dtype"),
            max_seq_len=request["context"],
            num_pages=self.pages(request),
            prefix_cache=request.get("prefix_cache", False),
        )
        seconds = time.perf_counter() - start
        facts = effinfer.info()
        return {
            "seconds": seconds,
            "version": facts.version,
            "isa": facts.isa,
        }

    @staticmethod
    def pages(request: dict[str, Any]) -> int | None:
        """Of the KV cache; None is the engine's own choice, enough for one sequence."""
        sequences = request.get("sequences", 1)
        return None if sequences == 1 else sequences * (request["context"] // 64 + 1)

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

    def batch(self, request: dict[str, Any]) -> dict[str, Any]:
        """Decode steps of all requests together: from the step in which the last prompt ended."""
        count = request["count"]
        params = effinfer.SamplingParams(temperature=0.0, max_tokens=count + 1, ignore_eos=True)
        engine = self.llm.engine
        ids = [engine.add(prompt, params.to_core()) for prompt in request["prompts"]]
        seen: set[int] = set()
        produced = 0
        start = 0.0
        while engine.has_work():
            outputs = engine.step()
            produced += sum(len(output.tokens) for output in outputs)
            if len(seen) < len(ids):
                seen.update(output.request for output in outputs)
                start = time.perf_counter()
                if len(seen) == len(ids) and produced != len(ids):
                    raise RuntimeError("the prompts did not fit into one step")
        seconds = time.perf_counter() - start
        for request_id in ids:
            engine.forget(request_id)
        if produced != (count + 1) * len(ids):
            raise RuntimeError(f"expected {(count + 1) * len(ids)} tokens, got {produced}")
        return {"seconds": seconds}

    def verify(self, request: dict[str, Any]) -> dict[str, Any]:
        """Median of steps that append the tokens to the prompt, with the logits of each, in the
        arithmetic of decoding; the tokens are then taken back."""
        if self.steps is None:
            self.steps = Steps(self.path, self.threads, self.llm.max_seq_len)
        return {
            "seconds": self.steps.median(request["prompt"], request["tokens"], request["steps"])
        }

    def bandwidth(self, request: dict[str, Any]) -> dict[str, Any]:
        """Seconds in which memory delivers so many bytes."""
        rate = _core.measure_read_bandwidth(_core.ThreadPool(self.threads))
        return {"seconds": request["bytes"] / rate}

    def logits(self, request: dict[str, Any]) -> dict[str, Any]:
        import numpy as np

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
            "batch": worker.batch,
            "verify": worker.verify,
            "bandwidth": worker.bandwidth,
            "logits": worker.logits,
            "tokenize": worker.tokenize,
        }
    )

"""OpenVINO GenAI's LLMPipeline on the same GGUF file, where it can read it."""

import time
from importlib.metadata import version
from typing import Any

import numpy as np
import openvino
import openvino_genai
from protocol import serve


class Worker:
    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        start = time.perf_counter()
        # The stateful back end keeps one sequence and has no prefix cache.
        self.pipeline = openvino_genai.LLMPipeline(
            request["model"],
            "CPU",
            INFERENCE_NUM_THREADS=request["threads"],
            ATTENTION_BACKEND="SDPA",
        )
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "version": version("openvino-genai")}

    def generate(self, tokens: list[int], count: int) -> np.ndarray:
        """Seconds from the start of the call to each of `count` greedy tokens."""
        ids = np.array([tokens], np.int64)
        inputs = openvino_genai.TokenizedInputs(
            openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))
        )
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = count
        config.min_new_tokens = count
        config.ignore_eos = True
        config.do_sample = False
        config.apply_chat_template = False
        times: list[float] = []
        start = time.perf_counter()

        class Clock(openvino_genai.StreamerBase):
            def write(self, token: Any) -> Any:
                now = time.perf_counter() - start
                times.extend([now] * (len(token) if isinstance(token, list) else 1))
                return openvino_genai.StreamingStatus.RUNNING

            def end(self) -> None:
                pass

        self.pipeline.generate(inputs, config, Clock())
        if len(times) != count:
            raise RuntimeError(f"expected {count} tokens, got {len(times)}")
        return np.array(times)

    def prefill(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"seconds": float(self.generate(request["tokens"], 1)[0])}

    def decode(self, request: dict[str, Any]) -> dict[str, Any]:
        times = self.generate(request["prompt"], request["count"] + 1)
        return {"seconds": float(times[-1] - times[0])}


if __name__ == "__main__":
    worker = Worker()
    serve({"load": worker.load, "prefill": worker.prefill, "decode": worker.decode})

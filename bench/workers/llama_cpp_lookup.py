"""llama.cpp with llama-cpp-python's prompt lookup, for the section `speculation`.

load   {model, threads, context, lookup}  -> {seconds, version}; lookup: tokens it guesses, 0: off
run    {prompt, text, count}              -> {seconds}: from the first of `count` tokens to the
                                             last. text: what is drawn, whatever the logits say
"""

import time
from importlib.metadata import version
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from llama_cpp_worker import BATCH
from protocol import serve


class Model(llama_cpp.Llama):
    """Draws the tokens of a text in the place of its own, which it draws all the same."""

    text: list[int] | None = None
    drawn = 0

    def sample(self, *arguments: Any, **options: Any) -> int:
        token = super().sample(*arguments, **options)
        self.drawn += 1
        return self.text[self.drawn - 1] if self.text else token


class Worker:
    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        lookup = request["lookup"]
        start = time.perf_counter()
        self.model = Model(
            request["model"],
            n_ctx=request["context"],
            n_batch=BATCH,
            n_ubatch=BATCH,
            n_threads=request["threads"],
            n_threads_batch=request["threads"],
            n_gpu_layers=0,
            flash_attn=True,
            draft_model=LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None,
            verbose=False,
        )
        return {"seconds": time.perf_counter() - start, "version": version("llama_cpp_python")}

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        self.model.text, self.model.drawn = request["text"], 0
        tokens: list[int] = []
        start = 0.0
        for token in self.model.generate(request["prompt"], temp=0.0, repeat_penalty=1.0):
            if not tokens:
                start = time.perf_counter()
            tokens.append(token)
            if len(tokens) == request["count"]:
                break
        return {"seconds": time.perf_counter() - start, "tokens": tokens}


if __name__ == "__main__":
    worker = Worker()
    serve({"load": worker.load, "run": worker.run})

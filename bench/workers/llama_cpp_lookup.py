"""llama.cpp with llama-cpp-python's prompt lookup, for the section `speculation`.

  load   {model, threads, context}          -> {seconds, version}
  run    {prompt, text, count, lookup}      -> {seconds}: from the first of `count` tokens to the
                                               last. text: what is drawn, whatever the logits say;
                                               lookup: how many tokens it guesses; 0: off

Prompt lookup is the wrapper's, and so is the loop around it; without it the loop is of C functions.
"""

import time
from importlib.metadata import version
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from llama_cpp_worker import BATCH
from llama_cpp_worker import Worker as Plain
from protocol import serve


class Model(llama_cpp.Llama):
    """Draws the tokens of a text in the place of its own, which it draws all the same."""

    text: list[int] | None = None
    drawn = 0

    def sample(self, *arguments: Any, **options: Any) -> int:
        token = super().sample(*arguments, **options)
        self.drawn += 1
        return self.text[self.drawn - 1] if self.text else token

    def guess(self, count: int) -> None:
        """Guessing takes the logits of all tokens."""
        self.draft_model = LlamaPromptLookupDecoding(num_pred_tokens=count) if count else None
        self._logits_all = count > 0


class Worker(Plain):
    def load(self, request: dict[str, Any]) -> dict[str, Any]:
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
            logits_all=True,  # else the wrapper has no room for guesses behind n_batch tokens
            verbose=False,
        )
        self.context = self.model._ctx.ctx
        self.vocab_size = self.model.n_vocab()
        return {"seconds": time.perf_counter() - start, "version": version("llama_cpp_python")}

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        lookup, count = request["lookup"], request["count"]
        self.model.guess(lookup)
        self.model.text, self.model.drawn = request["text"], 0
        self.model._requires_eval = True  # follow() left logits of other tokens
        stream = self.model.generate(request["prompt"], temp=0.0, repeat_penalty=1.0)
        tokens = [next(stream)]
        start = time.perf_counter()
        if lookup:
            tokens += [token for _, token in zip(range(count - 1), stream, strict=False)]
        else:
            self.follow(tokens, count, request["text"])
        return {"seconds": time.perf_counter() - start, "tokens": tokens}

    def follow(self, tokens: list[int], count: int, text: list[int] | None) -> None:
        """One token a step; generate() forgets them again when it is called next."""
        while len(tokens) < count:
            self.decode_tokens([tokens[-1]])
            token = int(self.last_logits().argmax())
            tokens.append(text[len(tokens)] if text else token)


if __name__ == "__main__":
    worker = Worker()
    serve({"load": worker.load, "run": worker.run})

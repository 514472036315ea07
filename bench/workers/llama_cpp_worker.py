"""llama.cpp through llama-cpp-python, by its C functions: the wrapper's own costs stay out."""

import time
from importlib.metadata import version
from typing import Any

import llama_cpp
import numpy as np
from protocol import serve

BATCH = 512  # llama.cpp's own default for both n_batch and n_ubatch


class Worker:
    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        options = {
            "n_ctx": request["context"],
            "n_batch": BATCH,
            "n_ubatch": BATCH,
            "n_threads": request["threads"],
            "n_threads_batch": request["threads"],
            "n_gpu_layers": 0,
            "flash_attn": request.get("flash_attention", True),
            "verbose": False,
        }
        start = time.perf_counter()
        self.model = llama_cpp.Llama(request["model"], **options)
        seconds = time.perf_counter() - start
        self.context = self.model._ctx.ctx
        self.vocab_size = self.model.n_vocab()
        return {
            "seconds": seconds,
            "version": version("llama_cpp_python"),
            "system": llama_cpp.llama_print_system_info().decode().strip(" |"),
        }

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def decode_tokens(self, tokens: list[int]) -> None:
        """Feeds tokens; the logits of the last one are then available."""
        for first in range(0, len(tokens), BATCH):
            part = tokens[first : first + BATCH]
            array = (llama_cpp.llama_token * len(part))(*part)
            status = llama_cpp.llama_decode(
                self.context, llama_cpp.llama_batch_get_one(array, len(part))
            )
            if status != 0:
                raise RuntimeError(f"llama_decode returned {status}")

    def last_logits(self) -> np.ndarray:
        pointer = llama_cpp.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(pointer, shape=(self.vocab_size,))

    def prefill(self, request: dict[str, Any]) -> dict[str, Any]:
        self.clear()
        start = time.perf_counter()
        self.decode_tokens(request["tokens"])
        self.last_logits().argmax()
        return {"seconds": time.perf_counter() - start}

    def decode(self, request: dict[str, Any]) -> dict[str, Any]:
        self.clear()
        self.decode_tokens(request["prompt"])
        token = int(self.last_logits().argmax())
        start = time.perf_counter()
        for _ in range(request["count"]):
            self.decode_tokens([token])
            token = int(self.last_logits().argmax())
        return {"seconds": time.perf_counter() - start}

    def logits(self, request: dict[str, Any]) -> dict[str, Any]:
        tokens = request["tokens"]
        rows = np.empty((len(tokens), self.vocab_size), np.float32)
        self.clear()
        if request["phase"] == "decode":
            for index, token in enumerate(tokens):
                self.decode_tokens([token])
                rows[index] = self.last_logits()
        else:
            self.prefill_rows(tokens, rows)
        np.save(request["path"], rows)
        return {}

    def prefill_rows(self, tokens: list[int], rows: np.ndarray) -> None:
        batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        for first in range(0, len(tokens), BATCH):
            part = tokens[first : first + BATCH]
            batch.n_tokens = len(part)
            for index, token in enumerate(part):
                batch.token[index] = token
                batch.pos[index] = first + index
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = 0
                batch.logits[index] = 1
            if llama_cpp.llama_decode(self.context, batch) != 0:
                raise RuntimeError("llama_decode failed")
            pointer = llama_cpp.llama_get_logits(self.context)
            shape = (len(part), self.vocab_size)
            rows[first : first + len(part)] = np.ctypeslib.as_array(pointer, shape=shape)
        llama_cpp.llama_batch_free(batch)

    def tokenize(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": self.model.tokenize(request["text"].encode(), add_bos=True)}


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

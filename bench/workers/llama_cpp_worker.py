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
        if request.get("sequences", 1) > 1:
            self.context = self.new_context(request)
        self.vocab_size = self.model.n_vocab()
        self.kept = ([], 0)
        return {
            "seconds": seconds,
            "version": version("llama_cpp_python"),
            "system": llama_cpp.llama_print_system_info().decode().strip(" |"),
        }

    def new_context(self, request: dict[str, Any]) -> Any:
        """A context for several sequences, which the wrapper's class does not make."""
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = request["sequences"]
        params.n_ctx = request["context"] * request["sequences"]
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = request["threads"]
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        return llama_cpp.llama_init_from_model(self.model._model.model, params)

    def clear(self) -> None:
        self.kept: tuple[list[int], int] = ([], 0)
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
        token = self.first_token(request["prompt"])
        start = time.perf_counter()
        for _ in range(request["count"]):
            self.decode_tokens([token])
            token = int(self.last_logits().argmax())
        return {"seconds": time.perf_counter() - start}

    def first_token(self, prompt: list[int]) -> int:
        """Feeds a prompt, or only forgets what came after it where the cache still holds it."""
        if prompt == self.kept[0]:
            memory = llama_cpp.llama_get_memory(self.context)
            llama_cpp.llama_memory_seq_rm(memory, 0, len(prompt), -1)
        else:
            self.clear()
            self.decode_tokens(prompt)
            self.kept = (prompt, int(self.last_logits().argmax()))
        return self.kept[1]

    def batch(self, request: dict[str, Any]) -> dict[str, Any]:
        self.clear()
        batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        prompts, count = request["prompts"], request["count"]
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        tokens = self.run_batch(batch, rows)
        start = time.perf_counter()
        for step in range(count):
            positions = [len(prompt) + step for prompt in prompts]
            rows = [(tokens[i], positions[i], i, True) for i in range(len(prompts))]
            tokens = self.run_batch(batch, rows)
        seconds = time.perf_counter() - start
        llama_cpp.llama_batch_free(batch)
        return {"seconds": seconds}

    def verify(self, request: dict[str, Any]) -> dict[str, Any]:
        prompt, tokens = request["prompt"], request["tokens"]
        self.first_token(prompt)
        memory = llama_cpp.llama_get_memory(self.context)
        batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        rows = [(token, len(prompt) + i, 0, True) for i, token in enumerate(tokens)]
        times = []
        for _ in range(request["steps"]):
            start = time.perf_counter()
            self.run_batch(batch, rows)
            times.append(time.perf_counter() - start)
            llama_cpp.llama_memory_seq_rm(memory, 0, len(prompt), -1)
        llama_cpp.llama_batch_free(batch)
        return {"seconds": float(np.median(times))}

    def run_batch(self, batch: Any, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Runs (token, position, sequence, wants logits) rows: the best next token of those."""
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = wanted
        if llama_cpp.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        count = sum(row[3] for row in rows)
        pointer = llama_cpp.llama_get_logits(self.context)
        logits = np.ctypeslib.as_array(pointer, shape=(count, self.vocab_size))
        return [int(row) for row in logits.argmax(axis=1)]

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
            "batch": worker.batch,
            "verify": worker.verify,
            "logits": worker.logits,
            "tokenize": worker.tokenize,
        }
    )

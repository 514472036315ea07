"""Decoding in which later tokens run fewer of the layers: graphs of one model over one cache."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from effinfer import _core
from effinfer.checkpoints.model_files import open_model
from effinfer.hub.progress import resolve_with_bar
from effinfer.requests.core_params import core_params
from effinfer.requests.parameters import complete
from effinfer.sampling import SamplingParams
from effinfer.techniques.graph_steps import GraphSteps
from effinfer.techniques.layers import num_layers, without_layers
from effinfer.text.state import TextState

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class DepthOutput:
    text: str
    token_ids: list[int]
    finish_reason: str  # "stop" or "length"
    layers: float  # that a decoded token ran, on average
    decode_s: float  # of the tokens behind the first


class DepthDecoder(ABC):
    """One text at a time, of one thread. A layer that a token leaves out has no keys of it, so no
    later token of the text may run that layer: `skipped` only grows.

    Args:
        model: as `LLM` takes it.
        max_seq_len: of prompt and output.
        threads: as LLM's.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        max_seq_len: int = 2048,
        threads: int | None = None,
    ) -> None:
        self._files = open_model(resolve_with_bar(model))
        graph = self._files.graph
        self.tokenizer = self._files.tokenizer()
        self.num_layers = num_layers(graph)
        self.steps = GraphSteps.of(self._files, graph, max_seq_len, threads)
        self._graphs = {frozenset[int](): self.steps.executable}
        self._layers_run = 0

    @abstractmethod
    def skipped(self, position: int) -> Collection[int]:
        """Layers that the output's token number `position`, from 0, leaves out."""

    def read(self, text: int, prompt: Sequence[int]) -> Logits:
        """Reads a prompt; [vocab] logits behind it."""
        logits: Logits = self.steps.feed(text, prompt)[0]
        return logits

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **keywords: Any
    ) -> DepthOutput:
        """Completes a prompt. Throws InvalidArgumentError for an empty prompt and for constraints
        and several answers, which it does not have, and OutOfMemoryError beyond max_seq_len."""
        params = complete(params, keywords, self._files.recommended_params)
        if params.n > 1 or params.constraint_field():
            raise _core.InvalidArgumentError(
                f"[{type(self).__name__}] params: expected one answer without a constraint"
            )
        ids = self._encode(prompt)
        (core,) = core_params(params, self.tokenizer)
        ends = set(params.stop_token_ids)
        ends |= set() if params.ignore_eos else set(self._files.graph.metadata["eos_token_ids"])
        sampler, output, state = (
            _core.Sampler(),
            list[int](),
            TextState(self.tokenizer, params.stop_strings()),
        )
        decoding, start, reason = self._decode(ids), perf_counter(), "length"
        logits = next(decoding)
        while True:
            token = sampler.sample(logits, core, ids, output, len(output)).token
            start = start if output else perf_counter()
            output.append(token)
            if token not in ends:
                state.push([token])
            if token in ends or state.stopped:
                reason = "stop"
            if reason == "stop" or len(output) == params.max_tokens:
                break
            logits = decoding.send(token)
        decoding.close()
        state.finish()
        layers = self._layers_run / max(len(output) - 1, 1)
        return DepthOutput(state.text, output, reason, layers, perf_counter() - start)

    def log_likelihoods(self, prompt: str | Sequence[int], output: Sequence[int]) -> list[float]:
        """Log-probability, in nats, of each token of an output, computed as it would be decoded."""
        import numpy as np

        decoding, found = self._decode(self._encode(prompt)), []
        logits = next(decoding)
        for token in output:
            row = logits.astype(np.float64)
            found.append(float(row[token] - row.max() - np.log(np.exp(row - row.max()).sum())))
            logits = decoding.send(token)
        decoding.close()
        return found

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise _core.InvalidArgumentError(f"[{type(self).__name__}] prompt: expected some text")
        return ids

    def _decode(self, prompt: Sequence[int]) -> Generator[Logits, int, None]:
        """Yields logits, gets the token that follows."""
        text, self._layers_run = self.steps.begin(), 0
        try:
            logits = self.read(text, prompt)
            position = 0
            while True:
                token = yield logits
                left_out = frozenset(self.skipped(position))
                logits = self.steps.feed(text, [token], 1, self._graph(left_out))[0]
                self._layers_run += self.num_layers - len(left_out)
                position += 1
        finally:
            self.steps.end(text)

    def _graph(self, skipped: frozenset[int]) -> _core.Executable:
        if skipped not in self._graphs:
            graph = without_layers(self._files.graph, skipped)
            self._graphs[skipped] = self.steps.beside(graph)
        return self._graphs[skipped]

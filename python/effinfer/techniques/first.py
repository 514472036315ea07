"""FiRST: Finetuning Router-Selective Transformers for Input-Adaptive Latency Reduction (Jain et al.
2024, arXiv:2410.12513): a router at each layer reads the prompt and says whether the answer may do
without that layer. The prompt runs all layers, and the answer always the same ones, so no key is
missing. Lossy.

The paper trains routers by gradient with the model's own loss, and adapters for what is missing.
Here a router is a linear map from the prompt's mean state before a layer to what leaving the layer
out costs, fitted in closed form to measured costs, and the model stays as it is.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from effinfer import _core
from effinfer.techniques.chain_proposer import check_sizes
from effinfer.techniques.depth_decoder import DepthDecoder
from effinfer.techniques.layer_routers import LayerRouters, loss, states_of
from effinfer.techniques.layers import with_hidden_states

if TYPE_CHECKING:
    from effinfer.techniques.layer_routers import Array


class FiRST(DepthDecoder):
    """`first = FiRST("smollm2-135m", skip=2); first.fit(texts); first.generate(prompt)`.

    Args:
        skip: layers that an answer leaves out; never the first one, nor the last.
        answer: tokens at the end of an example that count as its answer, when routers are fitted.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        skip: int,
        answer: int = 32,
        max_seq_len: int = 2048,
        threads: int | None = None,
    ) -> None:
        super().__init__(model, max_seq_len=max_seq_len, threads=threads)
        self.skip, self.answer = skip, answer
        check_sizes(self, {"skip": 0, "answer": 2})
        self.routers: LayerRouters | None = None
        self._inner = range(1, self.num_layers - 1)
        before = [layer - 1 for layer in self._inner]
        self._states = self.steps.beside(with_hidden_states(self._files.graph, before))
        self._left_out: list[int] = []

    def fit(self, examples: Sequence[str | Sequence[int]], ridge: float = 0.1) -> None:
        """Measures for each example what each layer is worth to its answer, in nats a token, and
        fits the routers: a step of the model for each layer and example. Throws
        InvalidArgumentError for examples that are no longer than their answer."""
        import numpy as np

        ids = [self._encode(example) for example in examples]
        if not ids or min(map(len, ids)) <= self.answer:
            raise _core.InvalidArgumentError(
                f"[FiRST] examples: expected some of more than {self.answer} tokens"
            )
        measured = [self.measure(example) for example in ids]
        states, costs = (np.array(part) for part in zip(*measured, strict=True))
        self.routers = LayerRouters.fit(states, costs, ridge)

    def measure(self, ids: Sequence[int]) -> tuple[Array, list[float]]:
        """The states that routers read, and what each inner layer is worth to the answer."""
        prompt, answer = ids[: -self.answer], ids[-self.answer :]
        text, losses = self.steps.begin(), []
        try:
            self.steps.feed(text, prompt, 1, self._states)
            states = states_of(self._states)
            for left_out in [(), *((layer,) for layer in self._inner)]:
                graph = self._graph(frozenset(left_out))
                logits = self.steps.feed(text, answer[:-1], len(answer) - 1, graph)
                losses.append(loss(logits, answer[1:]))
                self.steps.drop(text, len(answer) - 1)
        finally:
            self.steps.end(text)
        return states, [each - losses[0] for each in losses[1:]]

    def read(self, text: int, prompt: Sequence[int]) -> Array:
        if self.routers is None:
            raise _core.InvalidArgumentError("[FiRST] routers: expected fit() before this")
        logits: Array = self.steps.feed(text, prompt, 1, self._states)[0]
        costs = self.routers.costs(states_of(self._states))
        self._left_out = [self._inner[i] for i in costs.argsort()[: self.skip]]
        return logits

    def skipped(self, position: int) -> Collection[int]:
        return self._left_out

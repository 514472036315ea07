"""RAPID: Long-Context Inference with Retrieval-Augmented Speculative Decoding (Chen et al. 2025,
arXiv:2502.20330): the draft model reads only the parts of a long prompt that the question is about,
and so may be as large as the target. Lossy with `transfer`: the text's distribution leans to the
draft's, p' ~ p exp(transfer (q - p)), one step of distillation on the target's logits; with 0 it is
the target's.

The paper retrieves with embeddings and speaks of 128k tokens. Here pieces of the prompt are ranked
by the rare tokens that they share with its end, which is taken for the question.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

from effinfer import _core
from effinfer.checkpoints.model_files import ModelFiles, open_model
from effinfer.hub.progress import resolve_with_bar
from effinfer.speculation import Speculation
from effinfer.techniques.chain_proposer import check_sizes
from effinfer.techniques.draft_model import check_vocabulary
from effinfer.techniques.drawn_chain import DrawnChain, TransferVerifier
from effinfer.techniques.graph_steps import GraphSteps


@dataclass(frozen=True)
class RAPID:
    """`LLM(target, draft_model=RAPID("model.gguf"))`.

    Args:
        model: the draft model, of the same vocabulary; the target itself is one.
        length: of a draft.
        pieces: of 64 tokens, that the draft model reads of a prompt, beside its end.
        question: tokens at the end of a prompt that are always read.
        transfer: how far the target's distribution is moved to the draft's.
        max_tokens: of all texts at once, in the draft model's cache.
    """

    model: str | os.PathLike[str]
    length: int = 5
    pieces: int = 8
    question: int = 64
    transfer: float = 0.0
    max_tokens: int = 16384

    def speculation(self, target: ModelFiles) -> Speculation:
        """Throws InvalidArgumentError for another vocabulary and for values that cannot be."""
        check_sizes(self, {"length": 1, "pieces": 0, "question": 1, "max_tokens": 64})
        if not self.transfer >= 0:
            raise _core.InvalidArgumentError(
                f"[RAPID] transfer: expected at least 0, got {self.transfer!r}"
            )
        files = open_model(resolve_with_bar(self.model))
        check_vocabulary(target, files)
        steps = GraphSteps.of(files, files.graph, self.max_tokens)
        verifier = TransferVerifier(self.transfer, int(target.graph.metadata["vocab_size"]))
        return Speculation([Retrieved(steps, self)], verifier, self.length)


class Retrieved(DrawnChain):
    name = "retrieved"

    def __init__(self, steps: GraphSteps, recipe: RAPID) -> None:
        super().__init__(steps, recipe.length)
        self._recipe = recipe
        self._prompts: dict[int, list[int]] = {}

    def read(self, view: dict[str, Any]) -> list[int]:
        tokens, size = view["tokens"].tolist(), view["prompt_size"]
        if view["request"] not in self._prompts:
            recipe = self._recipe
            short = shorten(tokens[:size], recipe.pieces, recipe.question)
            self._prompts[view["request"]] = short
        return [*self._prompts[view["request"]], *tokens[size:]]

    def forget(self, request: int) -> None:
        super().forget(request)
        self._prompts.pop(request, None)


def shorten(prompt: list[int], pieces: int, question: int) -> list[int]:
    """The first token, the `pieces` 64-token pieces that share most with the last `question`
    tokens, by the rarity of what they share, in their order, and those last tokens."""
    cut = max(len(prompt) - question, 1)
    body = [prompt[i : min(i + 64, cut)] for i in range(1, cut, 64)]
    if len(body) <= pieces:
        return prompt
    found_in = Counter(token for piece in body for token in set(piece))
    weight = {t: math.log(1 + len(body) / found_in[t]) for t in set(prompt[cut:]) if found_in[t]}
    scores = [sum(weight.get(token, 0.0) for token in set(piece)) for piece in body]
    best = sorted(sorted(range(len(body)), key=lambda i: -scores[i])[:pieces])
    return [prompt[0], *(token for i in best for token in body[i]), *prompt[cut:]]

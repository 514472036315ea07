"""A model under test beside its reference, on one text: what the model tests share."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

import effinfer
from effinfer.hub import resolve
from tests.reference.decoder import Decoder
from tests.reference.metrics import Fidelity, compare, top2_gap

TEXT = Path(__file__).parents[1] / "data" / "essay.txt"
# `make fidelity`: the whole text, and lines for a table.
FULL = os.environ.get("EFFINFER_FULL") == "1"
FULL_POSITIONS = 1280
# The reference's own rounding decides between logits as close as this.
TIE = 1e-3
PROMPTS = [
    "The three laws of robotics are",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "The capital of France is Paris. The capital of Japan is",
    "To bake a simple loaf of bread you need",
]
NEW_TOKENS = 64


class Subject:
    """One model's file, its text as tokens and what the reference says about it.

    `positions` of the text are compared, more with EFFINFER_FULL=1. Perplexity needs many: its
    relative error has a spread of about sqrt(2 KL / positions).
    """

    def __init__(self, name: str, positions: int) -> None:
        self.name = name
        self.positions = FULL_POSITIONS if FULL else positions
        self.path = resolve(name)

    def load(self, **options: object) -> effinfer.LLM:
        return effinfer.LLM(str(self.path), **options)

    @cached_property
    def reference(self) -> Decoder:
        return Decoder.from_gguf(self.path)

    @cached_property
    def reference_logits(self) -> torch.Tensor:
        return self.reference.head(self.reference.hidden(self.tokens))

    @cached_property
    def tokens(self) -> list[int]:
        return self.load().tokenize(TEXT.read_text())[: self.positions]

    def fidelity(self, logits: np.ndarray, label: str) -> Fidelity:
        """Compares logits of the text; with EFFINFER_FULL=1 prints a line of the table."""
        result = compare(
            lambda rows: self.reference_logits[rows], lambda rows: logits[rows], self.tokens
        )
        if FULL:
            print(
                f"\n| {self.name} | {label} | {result.positions} | {result.kl_mean:.3e} | "
                f"{result.kl_max:.3e} | {result.perplexity:.4f} | "
                f"{result.reference_perplexity:.4f} | {100 * result.top1_agreement:.2f} % |"
            )
        return result

    def check_greedy(self, llm: effinfer.LLM) -> None:
        """Each greedy token is the reference's, given the tokens before it, unless the reference
        itself can hardly tell its best two apart: by induction, so is the text."""
        params = effinfer.SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
        ties = 0
        for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
            start = llm.tokenize(prompt)
            tokens = [*start, *output.token_ids]
            assert len(output.token_ids) == NEW_TOKENS
            hidden = self.reference.hidden(tokens[:-1])[len(start) - 1 :]
            logits = self.reference.head(hidden)
            best = logits.topk(2, -1).indices.tolist()
            gaps = top2_gap(logits).tolist()
            for step, token in enumerate(output.token_ids):
                if gaps[step] < TIE:
                    ties += 1
                    assert token in best[step], (prompt, step)
                else:
                    assert token == best[step][0], (prompt, step, gaps[step])
        assert ties <= len(PROMPTS), "the exception for ties must stay an exception"

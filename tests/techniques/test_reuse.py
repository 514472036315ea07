"""What reuse of a choice costs on a real model: SmolLM2 behind 3,000 tokens."""

from typing import Any

import numpy as np

from effinfer import LLM, SamplingParams
from effinfer.techniques import TokenSelect
from tests.model_files import smollm2_path
from tests.techniques.fed_text import NAMES, text_of
from tests.techniques.watching import watching

PROMPT, FOLLOWS = 3000, 400


class Forced:
    """A constraint that lets one text through."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.at = tokens, 0

    def fill(self, mask: np.ndarray) -> None:
        token = self.tokens[min(self.at, len(self.tokens) - 1)]
        mask[:] = 0
        mask[token // 32] = np.uint32(1 << token % 32)

    def accept(self, token: int) -> bool:
        self.at += 1
        return True

    def rollback(self, count: int) -> None:
        self.at -= count

    def ended(self) -> bool:
        return False


def perplexity(*techniques: Any) -> float:
    """Of tokens behind a prompt, one by one."""
    llm = LLM(smollm2_path(), techniques=list(techniques), max_seq_len=PROMPT + FOLLOWS + 32)
    tokens = llm.tokenize(text_of(NAMES))[: PROMPT + FOLLOWS]
    params = SamplingParams(temperature=0.0, max_tokens=FOLLOWS, ignore_eos=True, logprobs=0)
    llm.engine.add(tokens[:PROMPT], params.to_core(), Forced(tokens[PROMPT:]))
    logprobs: list[float] = []
    while llm.engine.has_work():
        for output in llm.engine.step():
            logprobs += [entry.logprob for entry in output.tokens]
    return float(np.exp(-np.mean(logprobs)))


def test_a_choice_serves_half_of_the_tokens_and_costs_little():
    """Of those in all layers and KV heads that choose."""
    counts: list[np.ndarray] = []

    def look(sequence: Any) -> None:
        counts.append(sequence.plane("token_select")[:, 4:6].sum(0))

    few = TokenSelect(budget=512)
    reusing = TokenSelect(budget=512, reuse=0.8)
    got = perplexity(reusing, watching(look, when="every", tokens=100))
    chose, reused = counts[-1]
    assert reused >= chose > 0
    assert got < 1.02 * perplexity(few)

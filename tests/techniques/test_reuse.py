"""What reuse of a choice costs on a real model: SmolLM2 behind 1,500 tokens."""

from typing import Any

import numpy as np

from effinfer import LLM
from effinfer.techniques import TokenSelect
from tests.model_files import smollm2_path
from tests.techniques.fed_text import NAMES, likelihoods_behind, text_of
from tests.techniques.watching import watching

PROMPT, FOLLOWS = 1500, 400
FEW: dict[str, Any] = {"budget": 256, "min_tokens": 0}  # a sixth of the keys


def perplexity(*techniques: Any) -> float:
    """Of tokens behind a prompt, one by one."""
    llm = LLM(smollm2_path(), techniques=list(techniques), max_seq_len=PROMPT + FOLLOWS + 32)
    tokens = llm.tokenize(text_of(NAMES))[: PROMPT + FOLLOWS]
    return float(np.exp(-likelihoods_behind(llm, tokens, PROMPT).mean()))


def test_a_choice_serves_half_of_the_tokens_and_costs_little():
    """Of those in all layers and KV heads that choose."""
    counts: list[np.ndarray] = []

    def look(sequence: Any) -> None:
        counts.append(sequence.plane("token_select")[:, 4:6].sum(0))

    few = TokenSelect(**FEW)
    reusing = TokenSelect(**FEW, reuse=0.8)
    got = perplexity(reusing, watching(look, when="every", tokens=100))
    chose, reused = counts[-1]
    assert reused >= chose > 0
    assert got < 1.02 * perplexity(few)

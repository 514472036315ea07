"""Tokens behind a prompt of whole pages, and methods that choose which of its keys they visit."""

from typing import Any

import numpy as np

from effinfer.techniques import DoubleSparsity, MagicPIG, Quest, TokenSelect
from tests.compiler.tiny_models import HEAD_DIM, KV_HEADS, LAYERS, Stepper, TinyModel

TOKENS = np.random.default_rng(8).integers(0, 101, 250).tolist()
PROMPT = 240  # of pages 0 to 3; behind the first and before the two newest one is chosen from
STEPS = {"max_tokens": 256, "max_rows": 256}

# Of the 64 keys that are chosen from.
CHOOSING = [
    Quest(unit=16, budget=224, min_tokens=0, skip_layers=0),
    TokenSelect(budget=202, min_tokens=0, skip_layers=0),
    DoubleSparsity(
        budget=202,
        min_tokens=0,
        skip_layers=0,
        channels=2,
        labels=(0, 1, 4, 5, 6, 7, 10, 11),
    ),
]
MEANS = tuple(np.random.default_rng(4).integers(-300, 300, LAYERS * KV_HEADS * HEAD_DIM).tolist())
DRAWING = MagicPIG(bits=3, tables=8, min_tokens=0, skip_layers=0, means=MEANS)


def generated(model: TinyModel, rows: int = 1, dense: list[int] | None = None, **options: Any):
    """Logits of the tokens behind the prompt, which are fed in steps of `rows`."""
    stepper = Stepper(model.compile(**STEPS, **options))
    stepper.step({0: TOKENS[:PROMPT]}, "prefill")
    parts = [TOKENS[i : i + rows] for i in range(PROMPT, len(TOKENS), rows)]
    return np.concatenate([stepper.step({0: part}, "decode", dense)[0] for part in parts])


def prompt_and_next(model: TinyModel) -> tuple[np.ndarray, np.ndarray]:
    """Logits of the prompt, and of the token behind it."""
    stepper = Stepper(model.compile(**STEPS))
    prompt = stepper.step({0: TOKENS[:PROMPT]}, "prefill")[0]
    return prompt, stepper.step({0: TOKENS[PROMPT : PROMPT + 1]}, "decode")[0]

"""What kept_keys.py measures: methods that drop, merge, visit or encode keys, by the labels of
their rows, and controls with as many keys. Methods are made when their row is wanted, since some
are fitted to a model first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from effinfer import LLM
from effinfer.techniques import (
    CSKV,
    GEAR,
    H2O,
    KIVI,
    XKV,
    ActQKV,
    AttentionPredictor,
    Chelsea,
    CommVQ,
    DoubleSparsity,
    InfLLMV2,
    Keyformer,
    KVCompose,
    MagicPIG,
    Meta,
    Quest,
    SnapKV,
    SqueezedAttention,
    StreamingLLM,
    SubGen,
    Technique,
    TokenButler,
    TokenSelect,
    WindowKV,
    hook,
)

# Trained for SmolLM2.
TRAINED = Path(__file__).resolve().parent.parent / "examples" / "selectors"
Methods = dict[str, tuple[Technique, ...]]  # by the labels of rows
Recipes = dict[str, Callable[[], Technique]]


CONTROL = Meta(
    paper="a control",
    arxiv="",
    family="kv.eviction",
    primitives=("residency", "hooks"),
    effect="approximate",
    exclusive=("kv.resident",),
    python_steps=True,
)


@dataclass(frozen=True)
class RandomKeys(Technique):
    """A control: of a prompt random keys stay, for each KV head its own, and the last ones."""

    META: ClassVar[Meta] = CONTROL

    budget: int = 1024
    window: int = 32
    heads: int = 90  # of layers without a window

    @hook(when="prompt_end")
    def keep(self, event: Any, sequence: Any) -> None:
        size, rng = sequence.length, np.random.default_rng(7)
        if size <= self.budget:
            return
        free = size - self.window
        lists = [
            [
                *sorted(rng.choice(free, self.budget - self.window, False).tolist()),
                *range(free, size),
            ]
            for _ in range(self.heads)
        ]
        sequence.retain(lists)


def is_wanted(label: str, rows: Collection[str]) -> bool:
    """Whether a row's label has one of these texts in it; none: all rows are wanted."""
    return not rows or any(row.lower() in label.lower() for row in rows)


def made(recipes: Recipes, rows: Collection[str]) -> Methods:
    """Those that are wanted."""
    return {label: (make(),) for label, make in recipes.items() if is_wanted(label, rows)}


def controls(budget: int, heads: int) -> Recipes:
    return {
        "random keys": lambda: RandomKeys(budget, heads=heads),
        "first and last keys": lambda: StreamingLLM(recent=budget - 4, reposition=False),
    }


def dropping(budget: int) -> Recipes:
    """So many keys stay, alone or for several."""
    half = budget // 2
    return {
        "`SnapKV`": lambda: SnapKV(budget),
        "`SnapKV`, window 8": lambda: SnapKV(budget, window=8),
        "`KVCompose`": lambda: KVCompose(budget),
        "`KVCompose`, budgets by layer": lambda: KVCompose(budget, layer_budgets=True),
        "`WindowKV`": lambda: WindowKV(budget),
        "`H2O`": lambda: H2O(budget, recent=half),
        "`Keyformer`": lambda: Keyformer(budget, recent=half),
        "`StreamingLLM`": lambda: StreamingLLM(recent=budget - 4),
        "`Chelsea`": lambda: Chelsea(budget),
        "`SubGen`": lambda: SubGen(budget),
    }


def visiting(llm: LLM, budget: int, text: str, context: int = 0) -> Recipes:
    """So many keys are visited by a generated token. `text` is what methods are fitted to,
    `context` the tokens whose keys are clustered once (0: a prompt's own)."""
    predictor, network = TRAINED / "token_butler.gguf", TRAINED / "attention_predictor.gguf"
    return {
        "`Quest`": lambda: Quest(budget=budget),
        "`Quest`, units of 32": lambda: Quest(budget=budget, unit=32),
        "`Quest`, units of 16": lambda: Quest(budget=budget, unit=16),
        "`InfLLMV2`": lambda: InfLLMV2(budget=budget, local=budget // 2),
        "`ActQKV`": lambda: ActQKV(budget=budget).calibrate(llm, text),
        "`SqueezedAttention`": lambda: SqueezedAttention(budget=budget, context=context),
        "`AttentionPredictor`": lambda: AttentionPredictor(budget=budget, path=str(network)),
        "`TokenButler`": lambda: TokenButler(budget=budget, path=str(predictor)),
        "`DoubleSparsity`": lambda: DoubleSparsity(budget=budget).calibrate(llm, text),
        "`TokenSelect`": lambda: TokenSelect(budget=budget),
        "`TokenSelect`, reuse 0.8": lambda: TokenSelect(budget=budget, reuse=0.8),
    }


def drawing(llm: LLM, text: str) -> Recipes:
    """How many keys are visited is what their hashes say."""
    return {"`MagicPIG`": lambda: MagicPIG().calibrate(llm, text)}


def encoding(llm: LLM, text: str) -> Recipes:
    """All keys stay, in fewer bits."""
    return {
        "`KIVI`, 4 bits": lambda: KIVI(bits=4),
        "`KIVI`, 2 bits": lambda: KIVI(bits=2),
        "`GEAR`": GEAR,
        "`CSKV`": lambda: CSKV().calibrate(llm, text),
        "`XKV`": lambda: XKV().calibrate(llm, text),
        "`CommVQ`": lambda: CommVQ().calibrate(llm, text),
    }

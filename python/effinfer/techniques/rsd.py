"""Reward-Guided Speculative Decoding for Efficient LLM Reasoning (Liao et al. 2025,
arXiv:2501.19324): a reward model scores each step of the small model, and the large one writes anew
those that score low. Lossy, towards the reward: it may end above what the large model would write.

The paper's rewards are of a trained process reward model. Here a reward is any function, and what
it knows is the caller's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from effinfer import _core
from effinfer.techniques.step_pair import StepPair, check_score

if TYPE_CHECKING:
    from effinfer.llm import LLM


class RSD(StepPair):
    """`RSD(large, small, reward).generate(prompt)`.

    Args:
        reward: of (prompt, text before the step, step), from 0 to 1; what it raises ends the call.
        threshold: the reward from which a step is kept.
        weight: in place of a threshold the probability that a step of a reward is kept, such as
            `lambda reward: reward`; drawn with `seed`.
    """

    def __init__(
        self,
        large: LLM,
        small: LLM,
        reward: Callable[[str, str, str], float],
        *,
        threshold: float = 0.7,
        weight: Callable[[float], float] | None = None,
        seed: int = 0,
        separator: str = "\n\n",
        step_tokens: int = 128,
    ) -> None:
        super().__init__(large, small, separator=separator, step_tokens=step_tokens)
        check_score(self, "threshold", threshold, 0, 1)
        if not callable(reward):
            raise _core.InvalidArgumentError(
                f"[RSD] reward: expected a function of (prompt, text, step), got {reward!r}"
            )
        self.reward, self.threshold, self.weight = reward, threshold, weight
        self._random = random.Random(seed)

    def judge(self, prompt: str, text: str, step: str) -> float:
        score = self.reward(prompt, text, step)
        if not 0 <= score <= 1:
            raise _core.InvalidArgumentError(f"[RSD] reward: expected 0 to 1, got {score!r}")
        return float(score)

    def accepts(self, score: float) -> bool:
        if self.weight is None:
            return score >= self.threshold
        return self._random.random() < self.weight(score)

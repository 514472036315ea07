"""DEL: Context-Aware Dynamic Exit Layer for Efficient Self-Speculative Decoding (Entezari Zarch et
al. 2025, arXiv:2504.05598): the model drafts with its own first layers, and where it leaves, and
for how many tokens, follows from how often each exit has been right lately.

The paper asks the head about every layer's states of each verified token, and counts layers. Here
exits are given, every `every`-th round each of them reads the last 16 tokens, and times are
measured. The deepest exit reads what was accepted, which gives a draft its first token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from effinfer import _core
from effinfer.checkpoints.model_files import ModelFiles
from effinfer.techniques.chain_proposer import ChainProposer, check_sizes, greedy_chain, probability
from effinfer.techniques.exit_choice import best_exit, blend
from effinfer.techniques.graph_steps import GraphSteps
from effinfer.techniques.skip_layers import EarlyExit

_WINDOW = 16


@dataclass(frozen=True)
class DEL:
    """`LLM(target, draft_model=DEL([8, 12, 16]))`.

    Args:
        exits: the first layer that each leaves out. Their layers and the head are packed anew.
        length: of a draft; it ends before where it is less likely than `least` to be right.
        every: rounds from one look at all exits to the next. max_tokens: of all texts at once.
    """

    exits: Sequence[int]
    length: int = 8
    least: float = 0.3
    every: int = 8
    max_tokens: int = 8192

    def for_target(self, target: ModelFiles) -> "DynamicExit":
        """Of one engine. Throws InvalidArgumentError for exits and sizes that cannot be."""
        check_sizes(self, {"length": 1, "every": 1, "max_tokens": 64})
        if not self.exits:
            raise _core.InvalidArgumentError("[DEL] exits: expected one at least")
        *others, deepest = [EarlyExit(e).apply(target.graph) for e in sorted(set(self.exits))]
        steps = GraphSteps.of(target, deepest, self.max_tokens)
        return DynamicExit(steps, [*map(steps.beside, others), steps.executable], self)


class DynamicExit(ChainProposer):
    name = "dynamic_exit"

    def __init__(self, steps: GraphSteps, exits: list[_core.Executable], recipe: DEL) -> None:
        super().__init__(steps, recipe.length)
        self._exits, self._recipe, self._rounds, self._drafted = exits, recipe, 0, 0.0
        self.right = [0.5] * len(exits)  # how often an exit says the next token
        self.seconds = [0.0] * len(exits)  # of a token; 0: not measured
        self.step_seconds = 0.0  # of the target's step

    def draft(
        self, view: dict[str, Any], text: int, fresh: list[int], length: int
    ) -> _core.Draft | None:
        if self._rounds % self._recipe.every == 0:
            fresh = self._look(text, view["tokens"].tolist(), fresh)
        self._rounds += 1
        place, depth = best_exit(self.right, self.seconds, self.step_seconds, length)
        tokens, scores = list[int](), list[float]()
        for level in range(depth):
            runs, start = place if level else -1, perf_counter()
            row = self.steps.feed(text, tokens[-1:] or fresh, 1, self._exits[runs])[-1]
            if level or len(fresh) <= _WINDOW:
                self.seconds[runs] = blend(self.seconds[runs], perf_counter() - start)
            tokens.append(int(row.argmax()))
            scores.append(probability(row, tokens[-1]))
            if math.prod(scores) < self._recipe.least:
                break
        self.steps.drop(text, max(len(tokens) - 1, 0))  # they lack the layers of deeper exits
        self._drafted = perf_counter()
        return greedy_chain(tokens, scores)

    def observe(self, _: list[dict[str, Any]]) -> None:
        if self._drafted:
            self.step_seconds = blend(self.step_seconds, perf_counter() - self._drafted)
        self._drafted = 0.0

    def _look(self, text: int, known: list[int], fresh: list[int]) -> list[int]:
        """What all exits would have said in the last tokens, which it leaves to be read."""
        window = known[-_WINDOW:]
        if fresh[: -len(window)]:
            self.steps.feed(text, fresh[: -len(window)])
        self.steps.drop(text, self.steps.cache.length(text) - (len(known) - len(window)))
        for place, runs in enumerate(self._exits) if len(window) > 1 else ():
            said = self.steps.feed(text, window, len(window), runs).argmax(1)[:-1].tolist()
            self.steps.drop(text, len(window))
            share = sum(map(int.__eq__, said, window[1:])) / len(said)
            self.right[place] = 0.7 * self.right[place] + 0.3 * share
        return window

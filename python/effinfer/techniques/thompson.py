"""Draft lengths by Thompson sampling: how likely a drafted token is right is believed as a Beta
distribution, and a draft goes on while draws from it say so."""

from __future__ import annotations

import random
from typing import Any

from effinfer import _core
from effinfer.speculation import DraftController


class ThompsonLength(DraftController):
    """Gives every draft as many nodes as draws say, `most` at most. One belief for all requests,
    that a token is right; `memory` is the share of it that a verified draft leaves."""

    name = "thompson"

    def __init__(self, most: int, memory: float = 0.98, seed: int = 0) -> None:
        self._most, self._memory, self._random = most, memory, random.Random(seed)
        self.right, self.wrong = 1.0, 1.0

    def budget(self, view: dict[str, Any]) -> int:
        """A token is asked for; then each further one while a draw from the belief comes true."""
        nodes = 1
        while nodes < self._most:
            if self._random.random() > self._random.betavariate(self.right, self.wrong):
                break
            nodes += 1
        return nodes

    def choose(
        self, views: list[dict[str, Any]], drafts: list[_core.Draft], step: dict[str, int]
    ) -> list[list[int]]:
        left, kept = step["draft_rows"], []
        for draft in drafts:
            count = min(left, len(draft.tokens))
            kept.append(list(range(count)))
            left -= count
        return kept

    def observe(self, step: dict[str, Any], facts: list[dict[str, Any]]) -> None:
        for fact in facts:
            if fact["verified"] is None or not len(fact["verified"].tokens):
                continue
            accepted = len(fact["accepted"])
            refused = accepted < len(fact["verified"].tokens)
            self.right = 1 + self._memory * (self.right - 1) + accepted
            self.wrong = 1 + self._memory * (self.wrong - 1) + refused

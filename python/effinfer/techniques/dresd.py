"""DReSD: Dense Retrieval for Speculative Decoding (Gritta et al. 2025, arXiv:2502.15572): what
followed, in a datastore, the hidden states that are nearest to the text's is drafted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from effinfer import _core
from effinfer.checkpoints.model_files import ModelFiles
from effinfer.speculation import Proposer
from effinfer.techniques.chain_proposer import check_sizes
from effinfer.techniques.dense_store import DenseStore, fits
from effinfer.techniques.vocab_trim import find_head


@dataclass(frozen=True)
class DReSD:
    """`LLM(model, draft_model=DReSD(DenseStore.of_texts(model, texts)))`.

    Args:
        store: states and tokens of some texts, by the same model.
        length: of a draft. width: neighbours, whose texts are merged into a tree.
        least: neighbours of a smaller cosine draft nothing.

    As in the paper states are reduced to principal axes and normalised. The paper searches all
    states with an approximate index; here those that gave the text's last token are searched, all
    of them. Nothing generated enters the store.
    """

    store: DenseStore
    length: int = 8
    width: int = 2
    least: float = 0.3

    def for_target(self, target: ModelFiles) -> Retrieved:
        """The proposer of one engine. Throws InvalidArgumentError for a store of another hidden
        size and for sizes that cannot be."""
        check_sizes(self, {"length": 1, "width": 1})
        if not fits(self.store, target):
            raise _core.InvalidArgumentError(
                f"[DReSD] store: expected states of this model, got {len(self.store.mean)} columns"
            )
        return Retrieved(self, find_head(target.graph)["inputs"][0])


class Retrieved(Proposer):
    name = "dresd"

    def __init__(self, recipe: DReSD, hidden: str) -> None:
        self._recipe, self.outputs = recipe, [hidden]
        self._states: dict[int, Any] = {}

    def observe(self, facts: list[dict[str, Any]]) -> None:
        for fact in facts:
            rows = fact["outputs"].get(self.outputs[0])
            last = int(fact["accepted"][-1]) + 1 if len(fact["accepted"]) else 0
            self._states[fact["request"]] = None if rows is None else rows[last].copy()

    def forget(self, request: int) -> None:
        self._states.pop(request, None)

    def propose(self, views: list[dict[str, Any]]) -> list[_core.Draft | None]:
        return [self._draft(view) for view in views]

    def _draft(self, view: dict[str, Any]) -> _core.Draft | None:
        state, recipe = self._states.get(view["request"]), self._recipe
        if state is None:
            return None
        draft = _core.Draft()
        for place, cosine in recipe.store.find(state, int(view["tokens"][-1]), recipe.width):
            node = -1
            if cosine < recipe.least:
                break
            for token in recipe.store.tokens[place : place + recipe.length].tolist():
                known = draft.child(node, token)
                if known < 0 and len(draft.tokens) == view["max_nodes"]:
                    return draft
                node = known if known >= 0 else draft.add(token, node, min(cosine, 1.0) * 0.8)
        return draft

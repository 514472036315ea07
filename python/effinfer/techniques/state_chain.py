"""What proposers share that run a graph of their own over what the target computed: values of its
graph at the row that each token was drawn from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from effinfer import _core
from effinfer.checkpoints.model_files import ModelFiles
from effinfer.techniques.chain_proposer import ChainProposer
from effinfer.techniques.graph_copy import GraphCopy
from effinfer.techniques.graph_steps import GraphSteps

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float32]


def with_row_outputs(target: ModelFiles, values: Mapping[str, str]) -> ModelFiles:
    """The model that also computes these values f32[T, size] at the rows of its logits, by names
    that `Proposer.outputs` may ask for: {name: value}."""
    copy = GraphCopy(target, target.weights, target.graph.name)
    logits = copy.take(target.graph.outputs[0])
    rows = copy.take("logit_rows")
    chosen = [copy.ops.select_rows(copy.take(value), rows) for value in values.values()]
    for value, name in zip(chosen, values, strict=True):
        copy.ops.rename(value, name)
    return replace(target, graph=copy.ops.finish(logits, *chosen))


class StateChain(ChainProposer):
    """Reads a text from its first generated token on: of the prompt there are no states. A draft's
    own rows are taken back before it is done."""

    def __init__(self, steps: GraphSteps, length: int, outputs: Mapping[str, str]) -> None:
        """outputs: {float input of the graph: value of the target's}."""
        super().__init__(steps, length)
        self._inputs = dict(outputs)
        self.outputs = list(outputs.values())
        self._first: dict[int, int] = {}  # of a request: the token that its states begin with
        self._states: dict[int, dict[str, Array]] = {}

    def observe(self, facts: list[dict[str, Any]]) -> None:
        import numpy as np

        for fact in facts:
            request, count = fact["request"], fact["num_emitted"]
            if request in self._gone:
                continue
            begin = len(fact["tokens"]) - count
            rows = [0, *(int(node) + 1 for node in fact["accepted"])]
            if len(rows) != count or any(name not in fact["outputs"] for name in self.outputs):
                self._drop(request)
                continue
            fresh = {
                name: fact["outputs"][value][rows].astype(np.float32)
                for name, value in self._inputs.items()
            }
            known = self._states.get(request)
            if known is None or self._end(request) != begin:
                self._drop(request)
                self._first[request], self._states[request] = begin, fresh
            else:
                self._states[request] = {
                    name: np.concatenate([known[name], fresh[name]]) for name in fresh
                }

    def propose(self, views: list[dict[str, Any]]) -> list[_core.Draft | None]:
        ready = [self._end(view["request"]) == len(view["tokens"]) for view in views]
        return [self._draft(view) if go else None for view, go in zip(views, ready, strict=True)]

    def forget(self, request: int) -> None:
        super().forget(request)
        self._drop(request)

    def read(self, view: dict[str, Any]) -> list[int]:
        tokens: list[int] = view["tokens"][self._first[view["request"]] :].tolist()
        return tokens

    def states(self, view: dict[str, Any], count: int) -> dict[str, Array]:
        """Of the text's last tokens, [count, size] each."""
        return {name: value[-count:] for name, value in self._states[view["request"]].items()}

    def _drop(self, request: int) -> None:
        """The text has to be read anew."""
        self._first.pop(request, None)
        self._states.pop(request, None)
        if request in self._texts:
            self.steps.end(self._texts.pop(request))

    def _end(self, request: int) -> int:
        if request not in self._first:
            return -1
        return self._first[request] + len(next(iter(self._states[request].values())))

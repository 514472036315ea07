"""A datastore of hidden states and the texts that followed them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from effinfer import _core
from effinfer.checkpoints.model_files import ModelFiles, open_model
from effinfer.hub.progress import resolve_with_bar
from effinfer.techniques.graph_copy import GraphCopy
from effinfer.techniques.graph_steps import GraphSteps
from effinfer.techniques.vocab_trim import find_head

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float32]

_CHUNK = 512  # tokens of a text that are read together


class DenseStore:
    """tokens i32 [n]; keys float32 [n, dims]: of the state that gave each token, turned and
    shortened; mean [hidden] and axes [hidden, dims] do that."""

    def __init__(
        self, tokens: npt.NDArray[np.int32], keys: Array, mean: Array, axes: Array
    ) -> None:
        import numpy as np

        self.tokens, self.keys, self.mean, self.axes = tokens, keys, mean, axes
        order = np.argsort(tokens[:-1], kind="stable")  # the last one has nothing behind it
        values, first = np.unique(tokens[:-1][order], return_index=True)
        self._places = dict(zip(values.tolist(), np.split(order, first[1:]), strict=True))

    @classmethod
    def of_states(cls, tokens: Sequence[int], states: Array, dims: int = 64) -> DenseStore:
        """states: what the model's head read before each token, [n, hidden]. Keys are along their
        `dims` principal axes."""
        import numpy as np

        states = np.asarray(states, np.float32)
        if len(states) != len(tokens) or len(states) < 2 or not 1 <= dims <= states.shape[1]:
            raise _core.InvalidArgumentError(
                f"[DReSD] expected 2 states or more, as many tokens and 1..{states.shape[-1]} "
                f"dims, got {len(states)}, {len(tokens)} and {dims}"
            )
        mean = states.mean(0)
        sample = states[:: max(1, len(states) // 8192)] - mean
        axes = np.linalg.svd(sample, full_matrices=False)[2][:dims].T.copy()
        keys = _unit(np.dot(states - mean, axes))
        return cls(np.asarray(tokens, np.int32), keys, mean, axes)

    @classmethod
    def of_texts(
        cls,
        model: str | os.PathLike[str],
        texts: Sequence[Sequence[int]],
        dims: int = 64,
    ) -> DenseStore:
        """Of texts of token ids, which the model reads, _CHUNK tokens at a time."""
        import numpy as np

        files = open_model(resolve_with_bar(model))
        copy = GraphCopy(files, files.weights, "states")
        graph = copy.ops.finish(copy.take(find_head(files.graph)["inputs"][0]))
        steps = GraphSteps.of(files, graph, _CHUNK, max_rows=_CHUNK)
        tokens, states = list[int](), []
        for whole in texts:
            for begin in range(0, len(whole) - 1, _CHUNK - 1):
                part = whole[begin : begin + _CHUNK]
                text = steps.begin()
                states.append(steps.feed(text, part, len(part))[:-1])
                tokens += part[1:]
                steps.end(text)
        if not tokens:
            raise _core.InvalidArgumentError("[DReSD] texts: expected some of two tokens or more")
        return cls.of_states(tokens, np.concatenate(states), dims)

    def find(self, state: Array, token: int, count: int) -> list[tuple[int, float]]:
        """Places behind the entries of this token whose states are nearest, with their cosines."""
        import numpy as np

        places = self._places.get(token)
        if places is None:
            return []
        cosines = self.keys[places] @ _unit(np.dot(state - self.mean, self.axes))
        best = np.argsort(-cosines, kind="stable")[:count]
        return [(int(places[i]) + 1, float(cosines[i])) for i in best]


def fits(store: DenseStore, target: ModelFiles) -> bool:
    head = find_head(target.graph)["inputs"][1]
    return bool(target.graph.values[head]["shape"][1] == len(store.mean))


def _unit(x: Array) -> Array:
    import numpy as np

    unit: Array = x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-6)
    return unit

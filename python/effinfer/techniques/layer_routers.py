"""What leaving a layer out costs a text, predicted from its prompt: a linear map for each layer,
fitted in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from effinfer import _core

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float32]


class LayerRouters:
    """weights: [layers, hidden + 1]."""

    def __init__(self, weights: Array) -> None:
        self.weights = weights

    @classmethod
    def fit(cls, states: Array, costs: Array, ridge: float) -> LayerRouters:
        """Ridge regression. states: [examples, layers, hidden + 1] as states_of() gives them;
        costs: [examples, layers]; ridge: more than 0, more is flatter."""
        import numpy as np

        if not ridge > 0:
            raise _core.InvalidArgumentError(f"[FiRST] ridge: expected more than 0, got {ridge!r}")
        weights = []
        for x, y in zip(states.transpose(1, 0, 2), costs.T, strict=True):
            weights.append(x.T @ np.linalg.solve(x @ x.T + ridge * np.eye(len(x)), y))
        return cls(np.array(weights))

    def costs(self, states: Array) -> Array:
        """[layers], of one prompt's [layers, hidden + 1]."""
        costs: Array = (self.weights * states).sum(1)
        return costs


def states_of(executable: _core.Executable) -> Array:
    """The direction of each layer's mean state in the last step, and a 1: [layers, hidden + 1]."""
    import numpy as np

    means = np.array([executable.output(name).mean(0) for name in executable.output_names])
    means /= np.linalg.norm(means, axis=1, keepdims=True)
    return np.concatenate([means, np.ones((len(means), 1), means.dtype)], 1)


def loss(logits: Array, tokens: Sequence[int]) -> float:
    """Of the tokens that follow each row, in nats a token."""
    import numpy as np

    shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
    chosen = shifted[np.arange(len(tokens)), list(tokens)]
    return float((np.log(np.exp(shifted).sum(1)) - chosen).mean())

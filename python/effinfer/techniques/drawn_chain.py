"""Chains that are drawn from a draft model, and the rejection that moves the target's distribution
towards the draft's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from effinfer import _core
from effinfer.speculation import Verifier
from effinfer.techniques.chain_proposer import ChainProposer
from effinfer.techniques.graph_steps import GraphSteps

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# The likeliest tokens of a row, of which one is drawn; a verifier sees them all.
_CANDIDATES = 64


class DrawnChain(ChainProposer):
    """Draws with the parameters of the request, and with randomness of its own seed."""

    def __init__(self, steps: GraphSteps, length: int) -> None:
        super().__init__(steps, length)
        self._sampler = _core.Sampler()

    def draft(
        self, view: dict[str, Any], text: int, fresh: list[int], length: int
    ) -> _core.Draft | None:
        import numpy as np

        known, size = view["tokens"].tolist(), view["prompt_size"]
        draft = _core.Draft()
        draft.draw = "without_replacement"
        random = np.random.default_rng([view["params"].seed, len(known)])
        output = known[size:]
        for node in range(length):
            row = self.steps.feed(text, fresh)[0]
            q = self._sampler.distribution(row, view["params"], known[:size], output, len(output))
            best = np.argsort(-q, kind="stable")[:_CANDIDATES]
            best = best[q[best] > 0]
            shares = q[best].astype(np.float64) / q[best].sum(dtype=np.float64)
            token = int(random.choice(best, p=shares))
            draft.set_candidates(node, dict(zip(best.tolist(), shares.tolist(), strict=True)))
            draft.add(token, node - 1, 0.5)
            fresh, output = [token], [*output, token]
        return draft


class TransferVerifier(Verifier):
    """Rejection sampling (Leviathan et al. 2023, arXiv:2211.17192) with p' ~ p exp(transfer (q -
    p)) for the target's p. With transfer 0 the text has the target's distribution."""

    name = "transfer"
    needs_distributions = True
    needs_probabilities = True

    def __init__(self, transfer: float, vocab_size: int) -> None:
        self._transfer, self._vocab_size = transfer, vocab_size
        self.guarantee = "lossy" if transfer else "same_distribution"

    def verify(self, draft: _core.Draft, rows: _core.TokenRows) -> None:
        row = 0
        for node, token in enumerate(draft.tokens):
            q = draft.candidates_of(row)
            p = self._moved(rows.distribution(row, self._vocab_size), q)
            if rows.uniform(1) * q[token] >= p[token]:
                left = residual(p, q)
                rows.emit(row, drawn(left, rows.uniform(2)) if left.any() else rows.sample(row))
                return
            if not rows.emit(row, token):
                return
            row = node + 1
        rows.emit(row, rows.sample(row))

    def _moved(self, p: npt.NDArray[np.float32], q: dict[int, float]) -> npt.NDArray[np.float64]:
        import numpy as np

        difference = -p.astype(np.float64)
        difference[list(q)] += list(q.values())
        moved = p * np.exp(self._transfer * difference)
        return np.asarray(moved / moved.sum(), np.float64)


def residual(p: npt.NDArray[np.float64], q: dict[int, float]) -> npt.NDArray[np.float64]:
    """What the target still wants where a draw from `q` was refused; unscaled."""
    left: npt.NDArray[np.float64] = p.copy()
    left[list(q)] -= list(q.values())
    left[left < 0] = 0
    return left


def drawn(weights: npt.NDArray[np.float64], uniform: float) -> int:
    import numpy as np

    sums = np.cumsum(weights)
    place = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    return min(place, len(weights) - 1)

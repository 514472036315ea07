"""What a model is and what it makes of token ids, without generating."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from effinfer.requests.arguments import check_choice

if TYPE_CHECKING:  # imported when arrays are asked for: they cost more than the rest
    import numpy as np
    import numpy.typing as npt

    from effinfer import _core


class Evaluation(ABC):
    """What has an engine."""

    @property
    @abstractmethod
    def engine(self) -> _core.Engine: ...

    def logits(
        self, token_ids: Sequence[int], *, phase: str = "prefill"
    ) -> npt.NDArray[np.float32]:
        """float32 [len(token_ids), vocab]: what the model expects after each token. "decode" feeds
        one token at a time, in the arithmetic of generation."""
        check_choice("phase", phase, ("prefill", "decode"))
        return self.engine.logits(token_ids, phase)

    def log_likelihoods(
        self, token_ids: Sequence[int], *, phase: str = "prefill"
    ) -> npt.NDArray[np.float64]:
        """float64 [len(token_ids) - 1]: the log-probability, in nats, of each token but the first
        given those before it. Never holds the logits of a long text."""
        check_choice("phase", phase, ("prefill", "decode"))
        return self.engine.log_likelihoods(token_ids, phase)

    @property
    def threads(self) -> int:
        return self.engine.threads

    @property
    def vocab_size(self) -> int:
        return self.engine.vocab_size

    @property
    def max_seq_len(self) -> int:
        return self.engine.max_seq_len

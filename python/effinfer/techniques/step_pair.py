"""Two models that write one text by steps: the small one proposes a step, somebody judges it, and
what is refused the large one writes anew. Texts are exchanged, so vocabularies may differ."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from effinfer import _core
from effinfer.requests.parameters import complete
from effinfer.sampling import SamplingParams
from effinfer.techniques.chain_proposer import check_sizes

if TYPE_CHECKING:
    from effinfer.llm import LLM


@dataclass
class StepOutput:
    """What two models wrote."""

    text: str = ""
    finish_reason: str = "length"
    small_tokens: int = 0  # of the text
    large_tokens: int = 0
    refused_tokens: int = 0  # of the small model, not in the text
    accepted: list[bool] = field(default_factory=list)  # by step: whether it is the small model's
    scores: list[float] = field(default_factory=list)  # what the judge gave each proposed step


class StepPair(ABC):
    """The loop of such methods. A step ends with `separator`; both models keep the text's pages in
    their prefix caches, so a step reads little more than what is new.

    Args:
        large, small: models; each is used through its own LLM, which others may use beside.
        separator: ends a step.
        step_tokens: of a step at most.
    """

    def __init__(
        self, large: LLM, small: LLM, *, separator: str = "\n\n", step_tokens: int = 128
    ) -> None:
        self.large, self.small = large, small
        self.separator, self.step_tokens = separator, step_tokens
        check_sizes(self, {"step_tokens": 1})
        if not isinstance(separator, str) or not separator:
            raise _core.InvalidArgumentError(
                f"[{type(self).__name__}] separator: expected a text, got {separator!r}"
            )

    @abstractmethod
    def judge(self, prompt: str, text: str, step: str) -> float:
        """A score of a step that would follow the text."""

    @abstractmethod
    def accepts(self, score: float) -> bool: ...

    def generate(
        self, prompt: str, params: SamplingParams | None = None, **keywords: Any
    ) -> StepOutput:
        """Completes a prompt. `params`, or the large model's, are of both models; max_tokens is of
        the text. Throws as LLM.generate()."""
        params = complete(params, keywords, lambda: self.large.default_params)
        stops = set(params.stop_strings())
        out = StepOutput()
        seed = params.seed
        while out.small_tokens + out.large_tokens < params.max_tokens:
            left = params.max_tokens - out.small_tokens - out.large_tokens
            request = replace(
                params,
                max_tokens=min(left, self.step_tokens),
                stop=[*stops, self.separator],
                seed=None if seed is None else seed + len(out.accepted),
            )
            step, tokens, reason = self._write(self.small, prompt + out.text, request)
            score = self.judge(prompt, out.text, step)
            accepted = self.accepts(score)
            if accepted:
                out.small_tokens += tokens
            else:
                out.refused_tokens += tokens
                step, tokens, reason = self._write(self.large, prompt + out.text, request)
                out.large_tokens += tokens
            out.text += step
            out.scores.append(score)
            out.accepted.append(accepted)
            if reason != "length":
                out.finish_reason = reason
                break
        return out

    def _write(self, llm: LLM, prompt: str, params: SamplingParams) -> tuple[str, int, str]:
        """A step with its separator, its tokens, and why the text ends; "length": it goes on."""
        (output,) = llm.generate([prompt], params)
        if output.error:
            raise _core.Error(f"[{type(self).__name__}] {output.error}")
        text, reason = output.text, output.finish_reason
        if reason == "stop" and self.separator in llm.detokenize(output.token_ids):
            return text + self.separator, len(output.token_ids), "length"
        return text, len(output.token_ids), reason


def check_score(owner: object, name: str, value: float, least: float, most: float) -> None:
    """Throws InvalidArgumentError for a threshold that no score is compared with."""
    if isinstance(value, bool) or not math.isfinite(value) or not least <= value <= most:
        raise _core.InvalidArgumentError(
            f"[{type(owner).__name__}] {name}: expected {least} to {most}, got {value!r}"
        )

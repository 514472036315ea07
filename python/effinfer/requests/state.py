"""What has come of one request so far: its tokens, its text, how it ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

from effinfer import _core
from effinfer.outputs import RequestMetrics, RequestOutput, SpeculationMetrics, TokenLogprobs
from effinfer.sampling import SamplingParams
from effinfer.text.state import TextState

if TYPE_CHECKING:
    from effinfer.text.tokenizer import Tokenizer


class RequestState:
    def __init__(
        self,
        params: SamplingParams,
        core: _core.SamplingParams,
        tokenizer: Tokenizer,
        *,
        keep_special: bool = False,
    ) -> None:
        """`core` is what the engine takes of `params` for this answer. keep_special: control tokens
        that the model writes are in its text."""
        self.params = params
        self.core = core
        self.text = TextState(tokenizer, params.stop_strings(), keep_special=keep_special)
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []  # from the second token on
        self.has_stop_token = False  # the last token only says the end
        self.finish_reason = ""
        self.error = ""
        self.metrics: RequestMetrics | None = None

    def take(self, output: _core.StepOutput) -> str:
        """Adds new tokens; returns the text that became certain. What comes after a stop string is
        dropped."""
        for scored in output.prompt:
            self.prompt_logprobs.append(TokenLogprobs(scored.logprob, scored.top))
        pieces = []
        for number, sampled in enumerate(output.tokens, 1):
            if self.text.stopped:
                break
            self.token_ids.append(sampled.token)
            is_stop = output.stop_token and number == len(output.tokens)
            if self.params.logprobs is not None:
                self.logprobs.append(TokenLogprobs(sampled.logprob, sampled.top))
            if is_stop:
                self.has_stop_token = True
            else:
                pieces.append(self.text.push([sampled.token]))
        if output.finish_reason is not None:
            pieces.append(self.text.finish())
        return "".join(pieces)

    def end(self, reason: str, error: str, metrics: RequestMetrics) -> None:
        self.finish_reason = "stop" if self.text.stopped else reason
        self.error = error
        self.metrics = metrics

    def output(self, index: int = 0) -> RequestOutput:
        """`index` is that of this answer. Throws InvalidArgumentError while the request runs."""
        if self.metrics is None:
            raise _core.InvalidArgumentError("[generate] output: the request has not ended")
        return RequestOutput(
            text=self.text.text,
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            metrics=self.metrics,
            error=self.error,
            logprobs=None if self.params.logprobs is None else self.logprobs,
            prompt_logprobs=[None, *self.prompt_logprobs]
            if self.core.prompt_logprobs >= 0
            else None,
            seed=self.core.seed,
            index=index,
        )


def take_metrics(engine: _core.Engine, request: int) -> RequestMetrics:
    """Metrics of a request that has ended; the engine forgets it."""
    counts = engine.metrics(request)
    drafts = SpeculationMetrics(**counts.pop("speculation"))
    engine.forget(request)
    return RequestMetrics(**counts, speculation=drafts)

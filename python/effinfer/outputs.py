"""What a request gives back."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SpeculationMetrics:
    """What drafts did for a request."""

    steps: int = 0  # that verified a draft
    drafted: int = 0  # tokens that got a row
    accepted: int = 0  # of these
    refused_drafts: int = 0  # of a proposer: they were wrong
    # Of the verifier: "same_text", "same_distribution" or "lossy".
    guarantee: str = "same_text"
    drafted_at: list[int] = field(default_factory=lambda: [0] * 16)  # by depth: 1, ..., 16 and more
    accepted_at: list[int] = field(default_factory=lambda: [0] * 16)


@dataclass(frozen=True)
class RequestMetrics:
    """Counts of tokens, times in seconds since the request was added."""

    prompt_tokens: int
    cached_tokens: int  # of the prompt, found in the prefix cache
    output_tokens: int
    preemptions: int
    time_to_first_token_s: float
    total_s: float
    speculation: SpeculationMetrics = field(default_factory=SpeculationMetrics)

    @property
    def decode_tok_s(self) -> float:
        """Tokens a second after the first; 0 for fewer than two."""
        seconds = self.total_s - self.time_to_first_token_s
        return (self.output_tokens - 1) / seconds if self.output_tokens > 1 and seconds > 0 else 0.0


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural logs of the model's distribution before any filter."""

    logprob: float  # of the chosen token
    top: list[tuple[int, float]]  # (token id, log probability), best first


@dataclass(frozen=True)
class RequestOutput:
    """What came of a request. Of several answers (SamplingParams.n) the fields are those of the
    first; `outputs` has all."""

    text: str  # without the stop string
    token_ids: list[int]
    finish_reason: str  # "stop", "length", "cancelled", "error"
    metrics: RequestMetrics
    error: str = ""  # why, when finish_reason is "error"
    logprobs: list[TokenLogprobs] | None = None  # one a token, when asked for
    # Of the prompt's tokens, when asked for; None for the first, which nothing predicts.
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    seed: int = 0  # that it was drawn with, asked for or fresh
    index: int = 0  # of the answer
    others: list[RequestOutput] = field(default_factory=list)  # the answers from the second on

    @property
    def outputs(self) -> list[RequestOutput]:
        """All answers to the prompt, by index."""
        return [self, *self.others]

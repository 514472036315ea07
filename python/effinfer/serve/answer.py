"""The choices of one answer, whole or as they grow, and what all routes do around them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from effinfer import _core
from effinfer.outputs import RequestOutput, TokenLogprobs
from effinfer.requests.async_generation import AsyncGeneration, AsyncRequest
from effinfer.sampling import SamplingParams
from effinfer.serve.connection import closed_on_disconnect
from effinfer.serve.errors import ApiError, engine_error, from_engine
from effinfer.serve.served import Served, logger


@dataclass
class Answer:
    """What a route makes of a request's body."""

    served: Served
    route: str
    generation: AsyncGeneration
    id: str
    created: int = field(default_factory=lambda: int(time.time()))
    started: float = field(default_factory=time.perf_counter)

    @property
    def choices(self) -> Sequence[AsyncRequest]:
        return self.generation.requests

    def close(self) -> None:
        """Counts and logs what came of the request."""
        prompts = self.generation.outputs()
        outputs = [output for prompt in prompts for output in prompt.outputs]
        for output in outputs:
            self.served.metrics.ended(self.route, output)
        usage = usage_of(prompts)
        logger.info(
            "%s %s %s prompt=%d cached=%d generated=%d first=%.3f total=%.3f%s",
            self.route,
            self.id,
            ",".join(sorted({output.finish_reason for output in outputs})),
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["completion_tokens"],
            outputs[0].metrics.time_to_first_token_s,
            time.perf_counter() - self.started,
            "".join(f" text={output.text!r}" for output in outputs) if self.served.log_text else "",
        )


async def start_answer(
    served: Served,
    route: str,
    prefix: str,
    requests: Sequence[tuple[Sequence[int], SamplingParams]],
    *,
    is_streamed: bool,
    keep_special: bool = False,
    schema_field: str,
) -> Answer:
    """Queues the choices of an answer. schema_field: of the body, where a JSON schema comes from.
    Throws ApiError."""
    try:
        generation = await served.model().start(
            requests, is_streamed=is_streamed, keep_special=keep_special
        )
    except _core.Error as error:
        raise from_engine(error, schema_field) from None
    return Answer(served, route, generation, f"{prefix}-{secrets.token_hex(12)}")


async def wait_for_answer(request: Request, answer: Answer) -> None:
    """Until all choices have ended. Throws ApiError when one failed in the engine."""
    try:
        async with closed_on_disconnect(request.receive, answer.generation):
            await answer.generation.wait_for_all()
    finally:
        answer.close()
    for choice in answer.choices:
        if choice.state.finish_reason == "error":
            raise engine_error(choice.state.error)
        if choice.state.finish_reason == "cancelled":  # nobody else is there to read it
            raise ApiError(503, "the server is shutting down", code="shutting_down")


def usage_of(prompts: Sequence[RequestOutput]) -> dict[str, Any]:
    """Prompts count once, whatever the number of their choices."""
    prompt = sum(output.metrics.prompt_tokens for output in prompts)
    completion = sum(len(answer.token_ids) for output in prompts for answer in output.outputs)
    cached = sum(output.metrics.cached_tokens for output in prompts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def visible_tokens(choice: AsyncRequest, begin: int = 0) -> tuple[list[int], list[TokenLogprobs]]:
    """Tokens from `begin` on with their log-probabilities, without one that only says the end."""
    state = choice.state
    end = len(state.token_ids) - state.has_stop_token
    return state.token_ids[begin:end], state.logprobs[begin:end]

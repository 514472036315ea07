"""SamplingParams of a request's body."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from effinfer import _core
from effinfer.async_llm import AsyncLLM
from effinfer.sampling import SamplingParams
from effinfer.serve.errors import ApiError, from_engine
from effinfer.serve.schemas import ChatBody, ResponseFormat, Sampling

_SAME_NAMES = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "bad_words",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
)


def sampling_params(
    body: Sampling,
    *,
    max_tokens: int,
    logprobs: int | None,
    llm: AsyncLLM,
    constraint: dict[str, Any],
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """What the body leaves open is the model's to say. Throws ApiError."""
    values = {name: getattr(body, name) for name in _SAME_NAMES}
    values = {name: value for name, value in values.items() if value is not None}
    if body.top_k is not None:
        values["top_k"] = max(body.top_k, 0)
    try:
        return replace(
            llm.default_params,
            **values,
            logit_bias=_logit_bias(body.logit_bias or {}, llm.engine.vocab_size),
            n=body.n or 1,
            seed=None if body.seed is None else body.seed % 2**64,
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            **(constraint or constraint_of(body)),
        )
    except _core.Error as error:
        raise from_engine(error, schema_field_of(body)) from None


def schema_field_of(body: Sampling) -> str:
    """The field that a JSON schema comes from."""
    return "response_format" if body.guided_json is None else "guided_json"


def constraint_of(body: Sampling) -> dict[str, Any]:
    """The constraint that a body asks for, by its name in SamplingParams; {} without one."""
    found = {
        name: value
        for name, value in {
            "json_schema": _schema_of(body.response_format) or _guided_json(body.guided_json),
            "regex": body.guided_regex,
            "choices": body.guided_choice,
            "grammar": body.guided_grammar,
        }.items()
        if value is not None
    }
    if len(found) > 1:
        raise ApiError(400, f"expected one of {', '.join(found)}", code="invalid_value")
    return found


def chat_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs: expected logprobs: true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _schema_of(form: ResponseFormat | None) -> dict[str, Any] | bool | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "object"}
    if form.json_schema is None or form.json_schema.schema_ is None:
        place = "response_format.json_schema.schema"
        raise ApiError(400, f"{place}: missing", param=place, code="missing_required_parameter")
    return form.json_schema.schema_


def _guided_json(given: dict[str, Any] | str | None) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError):
        raise ApiError(400, "guided_json: expected a JSON schema", param="guided_json") from None


def _logit_bias(given: dict[str, Any], vocab_size: int) -> dict[int, float]:
    biases = {}
    for name, bias in given.items():
        token = int(name) if name.isascii() and name.isdigit() and len(name) < 10 else -1
        if not 0 <= token < vocab_size:
            raise ApiError(
                400,
                f"logit_bias: expected token ids in [0, {vocab_size}), got {name[:40]!r}",
                param="logit_bias",
                code="invalid_value",
            )
        if isinstance(bias, bool) or not isinstance(bias, int | float) or abs(bias) > 100:
            place = f"logit_bias.{token}"
            raise ApiError(400, f"{place}: expected -100 to 100", param=place, code="invalid_value")
        biases[token] = bias
    return biases


def check_length(texts: Any, llm: AsyncLLM, param: str) -> None:
    """Refuses what cannot fit before it is tokenised, which would take seconds. Throws ApiError."""
    most = llm.engine.max_seq_len * llm.tokenizer.longest_token
    if _letters(texts) > most:
        raise _too_long(f"more than {llm.engine.max_seq_len}", llm.engine.max_seq_len, param)


def _letters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_letters, value.values()))
    return sum(map(_letters, value)) if isinstance(value, list) else 0


def _too_long(tokens: object, max_seq_len: int, param: str) -> ApiError:
    return ApiError(
        400,
        # Some clients look for OpenAI's words, not for its code.
        f"the prompt has {tokens} tokens; this model's maximum context length is {max_seq_len} "
        "tokens, one of them for an answer",
        param=param,
        code="context_length_exceeded",
    )


def prompt_room(prompt: list[int], max_seq_len: int, param: str) -> int:
    """Tokens that may follow a prompt. Throws ApiError when there are none."""
    if not prompt:
        raise ApiError(400, f"{param}: expected some text", param=param, code="invalid_value")
    if len(prompt) >= max_seq_len:
        raise _too_long(len(prompt), max_seq_len, param)
    return max_seq_len - len(prompt)


def check_stream_options(body: Sampling) -> bool:
    """Whether a stream ends with usage."""
    if body.stream_options is None:
        return False
    if not body.stream:
        raise ApiError(400, "stream_options: expected stream: true", param="stream_options")
    return bool(body.stream_options.include_usage)

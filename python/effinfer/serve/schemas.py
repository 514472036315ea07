"""The bodies of requests, as OpenAI defines them, with the options that others have added.

A field that is not here is refused by name. What only OpenAI's service could do with a field is
accepted and has no effect (`Ignored`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Choices = Annotated[int, Field(ge=1, le=128)]
# Texts are searched for stop strings with every token.
Word = Annotated[str, Field(min_length=1, max_length=64)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
# The first wrong item says enough: a body may have millions.
Ids = Annotated[list[TokenId], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Ignored(Body):
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    user: str | None = None


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(Body):
    model_config = ConfigDict(protected_namespaces=())

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Sampling(Ignored):
    """What the two routes of completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Probability | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    # Beyond OpenAI's.
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Probability | None = None
    typical_p: Probability | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    bad_words: Annotated[list[Word], Field(max_length=64)] | None = None
    dry_multiplier: Annotated[float, Field(ge=0, le=100)] | None = None
    dry_base: Annotated[float, Field(ge=1, le=10)] | None = None
    dry_allowed_length: Count | None = None
    dry_penalty_last_n: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    dry_sequence_breakers: Annotated[list[Word], Field(max_length=16)] | None = None
    top_n_sigma: Annotated[float, Field(ge=0, le=100)] | None = None
    xtc_probability: Probability | None = None
    xtc_threshold: Probability | None = None
    mirostat: Literal[0, 1, 2] | None = None
    mirostat_tau: Annotated[float, Field(ge=0, le=100)] | None = None
    mirostat_eta: Probability | None = None
    # Grammars, under the names that other servers have for them.
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None


class Function(Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class ChatBody(Sampling):
    messages: Objects
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=8)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionBody(Sampling):
    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | Ids
        | Annotated[list[Ids], Field(fail_fast=True)]
    )
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None  # 0: with echo
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


class TokenizeBody(Body):
    model: str | None = None
    content: str | None = None  # as llama.cpp's server names it
    prompt: str | None = None  # as vLLM does
    messages: Objects | None = None
    add_special: bool | None = None
    parse_special: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[Ids, Field(max_length=2**18)]
    skip_special: bool | None = None

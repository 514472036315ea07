"""How tokens are chosen and when a text ends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from effinfer import _core
from effinfer.foreign_names import check_names

_CONSTRAINTS = ("json_schema", "regex", "grammar", "choices")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The filters run in this order: what a grammar allows, logit_bias, repetition, frequency and
    presence penalties, temperature, top_k, typical_p, top_p, min_p, draw. A request's tokens depend
    on its own parameters and seed, not on the batch that it runs in."""

    temperature: float = 1.0  # 0: the most likely token
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off (Holtzman et al. 2020)
    min_p: float = 0.0  # 0: off (Nguyen et al. 2024)
    typical_p: float = 1.0  # 1: off (Meister et al. 2022)
    repetition_penalty: float = 1.0  # 1: off; over prompt and output (Keskar et al. 2019)
    frequency_penalty: float = 0.0  # over the output, times the count
    presence_penalty: float = 0.0  # over the output, once
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    max_tokens: int = 128
    stop: str | Sequence[str] = ()  # the text ends before the first of these
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # n: log probabilities of the token and the n most likely
    speculation: bool = True  # whether drafts may be verified for this request, where LLM drafts
    # At most one of these says what texts there may be (effinfer[grammar]); a text that ends by
    # max_tokens may be the beginning of one.
    json_schema: Mapping[str, Any] | bool | str | None = None  # draft 2020-12, or its JSON text
    regex: str | None = None  # of the whole text
    grammar: str | None = None  # in llguidance's variant of Lark, from `start`
    choices: Sequence[str] | None = None  # one of these

    def __new__(cls, **keywords: Any) -> "SamplingParams":
        check_names(keywords, cls.__dataclass_fields__)
        return super().__new__(cls)

    def stop_strings(self) -> tuple[str, ...]:
        """Throws InvalidArgumentError for an empty one."""
        strings = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(strings):
            raise _core.InvalidArgumentError("[sampling] stop: expected non-empty strings")
        return strings

    def constraint_field(self) -> str | None:
        """Which field says what texts there may be; None: none does. Throws InvalidArgumentError
        for more than one, and for a value of another type."""
        fields = [f for f in _CONSTRAINTS if getattr(self, f) is not None]
        if len(fields) > 1:
            raise _core.InvalidArgumentError(
                f"[sampling] {fields[1]}: expected None beside {fields[0]}"
            )
        for name in fields:
            value = getattr(self, name)
            if name == "choices":
                strings = not isinstance(value, str) and all(isinstance(v, str) for v in value)
                if strings and len(value) > 0:
                    continue
                raise _core.InvalidArgumentError("[sampling] choices: expected a list of texts")
            if name != "json_schema" and not isinstance(value, str):
                raise _core.InvalidArgumentError(f"[sampling] {name}: expected a text")
        return fields[0] if fields else None

    def to_core(self) -> _core.SamplingParams:
        """What the engine takes; throws InvalidArgumentError naming the field that is wrong."""
        try:
            return _core.SamplingParams(
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                min_p=self.min_p,
                typical_p=self.typical_p,
                repetition_penalty=self.repetition_penalty,
                frequency_penalty=self.frequency_penalty,
                presence_penalty=self.presence_penalty,
                logit_bias=dict(self.logit_bias),
                seed=self.seed,
                max_tokens=self.max_tokens,
                stop_token_ids=list(self.stop_token_ids),
                ignore_eos=self.ignore_eos,
                logprobs=-1 if self.logprobs is None else self.logprobs,
                speculation=self.speculation,
            )
        except TypeError:
            raise _core.InvalidArgumentError(
                f"[sampling] a field has a value of the wrong type: {self}"
            ) from None

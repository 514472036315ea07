"""How tokens are chosen and when a text ends."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from effinfer import _core
from effinfer.foreign_names import check_names

MOST_ANSWERS = 1024
_CONSTRAINTS = ("json_schema", "regex", "grammar", "choices")
# Of a fresh seed: whole in the float64 that readers of JSON make of numbers.
_SEED_BITS = 53


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What decides about a token runs in this order: what a grammar allows, logit_bias, bad_words,
    repetition, frequency and presence penalties, DRY, top_n_sigma, temperature, top_k, typical_p,
    top_p, min_p, XTC, mirostat, draw (docs/sampling.md). A request's tokens depend on its own
    parameters and seed, not on the batch that it runs in.

    Throws InvalidArgumentError naming the field that is wrong.
    """

    temperature: float = 1.0  # 0: the most likely token
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off (Holtzman et al. 2020)
    min_p: float = 0.0  # 0: off (Nguyen et al. 2024)
    typical_p: float = 1.0  # 1: off (Meister et al. 2022)
    repetition_penalty: float = 1.0  # 1: off; over prompt and output (Keskar et al. 2019)
    frequency_penalty: float = 0.0  # over the output, times the count
    presence_penalty: float = 0.0  # over the output, once
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[str] = ()  # that the output never has, as the tokenizer spells them
    # DRY: tokens that would go on with a repetition (P. E. Weidmann 2024).
    dry_multiplier: float = 0.0  # 0: off
    dry_base: float = 1.75
    dry_allowed_length: int = 2  # repeated tokens from which on there is a penalty
    dry_penalty_last_n: int = -1  # tokens that are looked at; -1: prompt and output
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")  # repetitions end there
    top_n_sigma: float = 0.0  # 0: off (Tang et al. 2024)
    # XTC: leaves out all but the least likely of the likely tokens (P. E. Weidmann 2024).
    xtc_probability: float = 0.0  # of acting; 0: off
    xtc_threshold: float = 0.1  # what is likely; above 0.5 it never acts
    mirostat: int = 0  # 0: off; its version, 1 or 2 (Basu et al. 2021)
    mirostat_tau: float = 5.0  # surprise to hold, in bits
    mirostat_eta: float = 0.1  # how fast it is corrected
    seed: int | None = None  # None: a fresh one a request, which its output tells
    n: int = 1  # answers, which share the prompt's pages; answer i has the seed + i
    max_tokens: int = 128  # 0: the prompt is only scored, with prompt_logprobs
    stop: str | Sequence[str] = ()  # the text ends before the first of these
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # n: log probabilities of the token and the n most likely
    prompt_logprobs: int | None = None  # the same of the prompt's tokens
    speculation: bool = True  # whether drafts may be verified for this request, where LLM drafts
    # Of LLM's techniques, objects or names; None: all of them; (): none, a plain request.
    techniques: str | Sequence[Any] | None = None
    # At most one of these says what texts there may be (effinfer[grammar]); a text that ends by
    # max_tokens may be the beginning of one.
    json_schema: Mapping[str, Any] | bool | str | None = None  # draft 2020-12, or its JSON text
    regex: str | None = None  # of the whole text
    grammar: str | None = None  # in llguidance's variant of Lark, from `start`
    choices: Sequence[str] | None = None  # one of these

    def __new__(cls, **keywords: Any) -> "SamplingParams":
        check_names(keywords, cls.__dataclass_fields__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self.stop_strings()
        self.constraint_field()
        for name in ("bad_words", "dry_sequence_breakers"):
            _texts(name, getattr(self, name))
        for name in ("logprobs", "prompt_logprobs"):
            _integer(name, getattr(self, name) or 0, "None or at least 0", 0)
        _integer("n", self.n, f"1 to {MOST_ANSWERS}", 1, MOST_ANSWERS)
        self.to_core()
        if self.max_tokens == 0 and self.n > 1:
            raise _wrong("n", "1 with max_tokens=0")

    def stop_strings(self) -> tuple[str, ...]:
        return (
            (self.stop,) if isinstance(self.stop, str) and self.stop else _texts("stop", self.stop)
        )

    def constraint_field(self) -> str | None:
        """Which field says what texts there may be; None: none does."""
        fields = [f for f in _CONSTRAINTS if getattr(self, f) is not None]
        if len(fields) > 1:
            raise _wrong(fields[1], f"None beside {fields[0]}")
        for name in fields:
            value = getattr(self, name)
            if name == "choices":
                strings = not isinstance(value, str) and all(isinstance(v, str) for v in value)
                if strings and len(value) > 0:
                    continue
                raise _wrong("choices", "a list of texts")
            if name != "json_schema" and not isinstance(value, str):
                raise _wrong(name, "a text")
        return fields[0] if fields else None

    def technique_names(self) -> list[str]:
        """Of `techniques`, which shall not be None."""
        several = isinstance(self.techniques, Sequence) and not isinstance(self.techniques, str)
        given: Any = self.techniques if several else (self.techniques,)
        names: list[Any] = [getattr(each, "name", each) for each in given]
        if all(isinstance(name, str) and name for name in names):
            return names
        raise _wrong("techniques", f"techniques or their names, got {self.techniques!r}")

    def to_core(self) -> _core.SamplingParams:
        """What the engine takes for the first answer, but for the tokens of `bad_words` and
        `dry_sequence_breakers`."""
        return _core.SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            typical_p=self.typical_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=_as("logit_bias", dict, self.logit_bias),
            dry_multiplier=self.dry_multiplier,
            dry_base=self.dry_base,
            dry_allowed_length=self.dry_allowed_length,
            dry_penalty_last_n=self.dry_penalty_last_n,
            top_n_sigma=self.top_n_sigma,
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
            mirostat=self.mirostat,
            mirostat_tau=self.mirostat_tau,
            mirostat_eta=self.mirostat_eta,
            seed=secrets.randbits(_SEED_BITS) if self.seed is None else self.seed,
            max_tokens=self.max_tokens,
            stop_token_ids=_as("stop_token_ids", list, self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            logprobs=-1 if self.logprobs is None else self.logprobs,
            prompt_logprobs=-1 if self.prompt_logprobs is None else self.prompt_logprobs,
            speculation=self.speculation,
            techniques=None if self.techniques is None else self.technique_names(),
        )


def _wrong(name: str, expected: str) -> _core.Error:
    return _core.InvalidArgumentError(f"[sampling] {name}: expected {expected}")


def _integer(name: str, value: Any, expected: str, least: int, most: int = 2**31 - 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise _wrong(name, f"{expected}, got {value!r}")


def _as(name: str, kind: Any, value: Any) -> Any:
    try:
        return kind(value)
    except (TypeError, ValueError):
        what = "tokens and numbers" if kind is dict else "a list of tokens"
        raise _wrong(name, f"{what}, got {value!r}") from None


def _texts(name: str, values: Any) -> tuple[str, ...]:
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    if is_list and all(isinstance(value, str) and value for value in values):
        return tuple(values)
    raise _wrong(name, f"non-empty strings, got {values!r}")

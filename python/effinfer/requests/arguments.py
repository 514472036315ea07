"""Checks and normal forms of what callers of LLM pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias

from effinfer import _core
from effinfer.foreign_names import loading_hint
from effinfer.sampling import SamplingParams

if TYPE_CHECKING:
    from effinfer.text.tokenizer import Tokenizer

Prompt: TypeAlias = str | Sequence[int]


def check_choice(name: str, value: object, valid: Sequence[str], hint: str = "") -> None:
    if value not in valid:
        names = ", ".join(repr(choice) for choice in valid)
        raise _core.InvalidArgumentError(f"[LLM] {name}: expected {names}, got {value!r}{hint}")


def check_sizes(
    threads: int | None,
    max_seq_len: int | None,
    num_pages: int | None,
    max_batch_tokens: int | None,
) -> None:
    sizes = {
        "threads": threads,
        "max_seq_len": max_seq_len,
        "num_pages": num_pages,
        "max_batch_tokens": max_batch_tokens,
    }
    for name, value in sizes.items():
        if value is not None and (not isinstance(value, int) or not 1 <= value < 2**31):
            raise _core.InvalidArgumentError(
                f"[LLM] {name}: expected None or 1 to 2^31 - 1, got {value!r}"
            )


def refuse_unknown(call: Callable[..., object], names: Collection[str]) -> None:
    """Throws InvalidArgumentError for keywords that `call` does not know; it names those that it
    does, or what another library's names stand for."""
    if not names:
        return
    meant = [found for name in names if (found := loading_hint(name))]
    parameters = inspect.signature(call).parameters.values()
    known = ", ".join(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
    instead = "; ".join(meant) or f"expected one of {known}"
    raise _core.InvalidArgumentError(f"[LLM] {', '.join(names)}: unknown option; {instead}")


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable):
        raise _wrong_prompt("prompts", prompts)
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, Integral) for item in items):
        return [items]
    return items


def pair_params(
    prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams]
) -> list[tuple[Prompt, SamplingParams]]:
    if isinstance(params, SamplingParams):
        return [(prompt, params) for prompt in prompts]
    if len(params) != len(prompts):
        raise _core.InvalidArgumentError(
            f"[generate] params: expected one or {len(prompts)}, got {len(params)}"
        )
    return list(zip(prompts, params, strict=True))


def encode_prompt(tokenizer: Tokenizer, prompt: Prompt, index: int = 0) -> list[int]:
    """Token ids of a prompt, the `index`th of a call. Throws InvalidArgumentError for none."""
    if isinstance(prompt, bytes) or not isinstance(prompt, Iterable):
        raise _wrong_prompt(f"prompts[{index}]", prompt)
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    if len(prompt) == 0 or not ids:
        raise _core.InvalidArgumentError(f"[generate] prompts[{index}]: expected some text")
    return ids


def encode_prompts(
    tokenizer: Tokenizer, requests: Sequence[tuple[Prompt, SamplingParams]]
) -> list[tuple[list[int], SamplingParams]]:
    return [
        (encode_prompt(tokenizer, prompt, index), params)
        for index, (prompt, params) in enumerate(requests)
    ]


def _wrong_prompt(where: str, got: object) -> _core.Error:
    kind = type(got).__name__
    return _core.InvalidArgumentError(
        f"[generate] {where}: expected a text or token ids, got {kind}"
    )


def check_choices(device: str, precision: str, kv_dtype: str | None, ternary_packing: str) -> None:
    """The options of a load that are one of a few words. Throws InvalidArgumentError."""
    for part in device.split("+"):
        _core.parse_placement(part, "[LLM] device")
    check_choice("precision", precision, ("fast", "f32"))
    check_choice("ternary_packing", ternary_packing, ("auto", "t2", "t1_6"))
    if kv_dtype is not None:
        check_choice("kv_dtype", kv_dtype, ("f32", "f16", "bf16", "i8"))

"""What the engine is told of a request's parameters: words as tokens of the model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

from effinfer import _core
from effinfer.sampling import SamplingParams

if TYPE_CHECKING:
    from effinfer.text.tokenizer import Tokenizer


def core_params(params: SamplingParams, tokenizer: Tokenizer) -> list[_core.SamplingParams]:
    """One an answer. Draws the seed of a request that names none; the first answer scores the
    prompt. Throws InvalidArgumentError."""
    first = params.to_core()
    if params.bad_words:
        first.bad_words = [ids for word in params.bad_words for ids in word_tokens(tokenizer, word)]
    if params.dry_multiplier > 0:
        first.dry_sequence_breakers = breaker_tokens(tokenizer, params.dry_sequence_breakers)
    answers = [first]
    for index in range(1, params.n):
        answers.append(copy.copy(first))
        answers[-1].seed = (first.seed + index) % 2**64
        answers[-1].prompt_logprobs = -1
    return answers


def word_tokens(tokenizer: Tokenizer, word: str) -> list[list[int]]:
    """The token sequences that spell a word: with and without a space before it, where a text
    begins and behind a line end, since some tokenizers put a space before a text's first word."""
    bare = word.lstrip(" ") or word
    line_end = tokenizer.encode("\n", add_special=False)
    found: dict[tuple[int, ...], None] = {}
    for spelled in (bare, " " + bare):
        found[tuple(tokenizer.encode(spelled, add_special=False))] = None
        behind = tokenizer.encode("\n" + spelled, add_special=False)
        if behind[: len(line_end)] == line_end:
            found[tuple(behind[len(line_end) :])] = None
    found.pop((), None)
    if not found:
        raise _core.InvalidArgumentError(
            f"[sampling] bad_words: expected words that the tokenizer spells, got {word!r}"
        )
    return [list(ids) for ids in found]


def breaker_tokens(tokenizer: Tokenizer, breakers: Sequence[str]) -> list[int]:
    """Ascending ids of the tokens whose text has a breaker in it; of a breaker that is longer than
    any token, the last token that spells it."""
    found: set[int] = set()
    for breaker in breakers:
        having = tokenizer.tokens_with(breaker)
        found.update(having or tokenizer.encode(breaker, add_special=False)[-1:])
    return sorted(found)

"""What texts a request may have: SamplingParams(json_schema=, regex=, grammar=, choices=), by way
of llguidance, which turns a grammar into masks of tokens."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from effinfer import _core
from effinfer.requests import grammar_limits as limits
from effinfer.sampling import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from effinfer.text.tokenizer import Tokenizer

# Compiled grammars that are kept: a service asks for the same few again and again.
_MOST_KEPT = 64
# Symbols of a grammar and the work of building its lexer: some 100 ms and 100 MB, beyond which a
# grammar is refused.
_MOST_SYMBOLS = 200_000
_LEXER_FUEL = 5_000_000


# Between the tokens of JSON: what pretty printers write, and no more, as a hot model would go on
# with spaces and line ends for ever.
_JSON = {"whitespace_pattern": r" ?|\n {0,32}"}


class Constraint:
    """What may follow a request's tokens: the engine's `constraint`."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill(self, mask: npt.NDArray[np.uint32]) -> None:
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()

    def accept(self, token: int) -> bool:
        accepted: int = self._matcher.try_consume_tokens([token])
        self._check()
        return accepted == 1

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)
        self._check()

    def ended(self) -> bool:
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RuntimeError(f"[grammar] {self._matcher.get_error()}")


class GrammarCompiler:
    """Compiles for one model's vocabulary, which it reads when the first request needs it, and
    keeps what it compiled last. Safe to use from several threads."""

    def __init__(self, vocab_size: int, metadata: Mapping[str, Any]) -> None:
        """`metadata`: the graph's."""
        self._vocab_size = vocab_size
        self._eos_token_ids: Sequence[int] = metadata.get("eos_token_ids", ())
        self._library: Any = None
        self._tokenizer: Any = None
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def constraint(self, params: SamplingParams, tokenizer: Tokenizer) -> Constraint | None:
        """None for a request that may say anything. Throws InvalidArgumentError for a grammar that
        cannot be compiled, UnsupportedError without llguidance or an end token."""
        field = params.constraint_field()
        if field is None:
            return None
        with self._lock:
            if self._tokenizer is None:
                self._read_vocabulary(tokenizer)
        source = self._source(field, getattr(params, field))
        with self._lock:
            matcher = self._kept.pop(source, None)
        if matcher is None:
            matcher = limits.on_deep_stack(lambda: self._compile(field, source))
        with self._lock:
            self._kept[source] = matcher
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        return Constraint(matcher.deep_copy())

    def _read_vocabulary(self, tokenizer: Tokenizer) -> None:
        self._library = _llguidance()
        ends = [*self._eos_token_ids] or [i for i in [tokenizer.eos_token_id] if i is not None]
        if not ends:
            raise _core.UnsupportedError("[grammar] the model's vocabulary names no end token")
        self._tokenizer = self._library.LLTokenizer(
            tokenizer.backend.to_str(), n_vocab=self._vocab_size, eos_token=ends
        )

    def _source(self, field: str, value: Any) -> str:
        matcher = self._library.LLMatcher
        source: str
        if field == "json_schema":
            try:
                text = value if isinstance(value, str) else json.dumps(value)
                schema = json.loads(text) if isinstance(value, str) else value
                source = matcher.grammar_from_json_schema(text, defaults=_JSON)
            except (TypeError, ValueError, RecursionError) as error:
                raise _invalid(field, str(error)) from None
            limits.check_size(field, text)
            limits.check_schema(schema)
        elif field == "grammar":
            limits.check_size(field, value)
            limits.check_grammar(value)
            source = value
        elif field == "regex":
            limits.check_size(field, value)
            limits.check_choices(field, value)
            source = matcher.grammar_from_regex(value)
        else:
            # A grammar of as many alternatives would be compiled in five times the time.
            text = "|".join(map(limits.literal, value))
            limits.check_size(field, text)
            source = matcher.grammar_from_regex(text)
        return source

    def _compile(self, field: str, source: str) -> Any:
        most = self._library.LLParserLimits(
            max_grammar_size=_MOST_SYMBOLS, initial_lexer_fuel=_LEXER_FUEL
        )
        matcher = self._library.LLMatcher(self._tokenizer, source, log_level=0, limits=most)
        if matcher.is_error():
            raise _invalid(field, str(matcher.get_error()))
        return matcher


def _invalid(field: str, reason: str) -> _core.InvalidArgumentError:
    return _core.InvalidArgumentError(f"[sampling] {field}: {' '.join(reason.split())}")


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise _core.UnsupportedError(
            "[grammar] expected llguidance, which is not installed: pip install effinfer[grammar]"
        ) from None
    return llguidance

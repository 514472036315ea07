"""Tokens one by one, as log-probabilities show them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from tokenizers import pre_tokenizers

from effinfer.outputs import TokenLogprobs

if TYPE_CHECKING:
    from effinfer.text.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_letters() -> dict[str, int]:
    """The letters that byte-level vocabularies write for bytes: printable bytes are themselves,
    the others follow from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    letters |= {chr(256 + index): byte for index, byte in enumerate(others)}
    assert letters.keys() == set(pre_tokenizers.ByteLevel.alphabet())
    return letters


def bounded(logprob: float) -> float:
    """JSON has no infinity; OpenAI's service writes this number."""
    return max(logprob, -9999.0)


class TokenTexts:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._letters = _byte_letters() if "ByteLevel" in str(tokenizer.backend.decoder) else {}
        self._known: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._find(token)
        return known

    def text_of(self, token: int) -> str:
        return self.bytes_of(token).decode("utf-8", "replace")

    def chat_entry(self, token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        """OpenAI's entry of chat completions."""
        top = [self._one(other, logprob) for other, logprob in logprobs.top]
        return {**self._one(token, logprobs.logprob), "top_logprobs": top}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        data = self.bytes_of(token)
        return {
            "token": data.decode("utf-8", "replace"),
            "logprob": bounded(logprob),
            "bytes": list(data),
        }

    def _find(self, token: int) -> bytes:
        spelled = self._tokenizer.token(token)
        byte = _BYTE.fullmatch(spelled)
        if byte:
            return bytes([int(byte[1], 16)])
        if self._letters:
            codes = [self._letters.get(letter) for letter in spelled]
            return spelled.encode() if None in codes else bytes(code or 0 for code in codes)
        return spelled.replace("▁", " ").encode()

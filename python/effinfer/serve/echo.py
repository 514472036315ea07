"""The prompt of a completion, said again before its answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from effinfer.requests.async_generation import AsyncRequest
from effinfer.serve.token_texts import TokenTexts, bounded


@dataclass
class Echo:
    text: str  # "" for none
    ids: Sequence[int]
    first: AsyncRequest  # of the prompt's choices, which scores it
    texts: TokenTexts
    has_logprobs: bool

    def logprobs(self) -> dict[str, list[Any]]:
        """OpenAI's lists, a place for each token of the prompt; nothing predicts the first."""
        scored = self.first.state.prompt_logprobs
        return {
            "tokens": [self.texts.text_of(token) for token in self.ids],
            "token_logprobs": [None, *(bounded(entry.logprob) for entry in scored)],
            "top_logprobs": [
                None,
                *(
                    {self.texts.text_of(token): bounded(logprob) for token, logprob in entry.top}
                    for entry in scored
                ),
            ],
            "text_offset": list(self._offsets()),
        }

    def _offsets(self) -> Iterator[int]:
        """Letters of the text before each token. What the text does not have takes no room: control
        tokens, and the space that some tokenizers put before the first word."""
        data, place, letters = self.text.encode(), 0, 0
        for token in self.ids:
            yield letters
            spelled = self.texts.bytes_of(token)
            for part in (spelled, spelled.lstrip(b" ")):
                if data.startswith(part, place):
                    place += len(part)
                    letters += sum(byte & 0xC0 != 0x80 for byte in part)
                    break

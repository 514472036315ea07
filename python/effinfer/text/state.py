"""The text of one request as its tokens come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from effinfer.text.tokenizer import Tokenizer


class TextState:
    """Decodes tokens and ends the text before the first stop string.

    push() returns the text that is certain: characters that are whole, less a tail that may be the
    beginning of a stop string.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str], *, keep_special: bool = False
    ) -> None:
        self._stream = tokenizer.stream(skip_special=not keep_special)
        self._stop = stop
        self._text = ""
        self._sent = 0
        self.stopped = False

    @property
    def text(self) -> str:
        return self._text

    def push(self, ids: Sequence[int]) -> str:
        return self._extend(self._stream.push(ids), final=False)

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        return self._extend(self._stream.finish(), final=True)

    def _extend(self, piece: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        # A stop string that ends in the new piece begins at most its length - 1 before it.
        longest = max(map(len, self._stop), default=1)
        begin = max(0, len(self._text) - longest + 1)
        self._text += piece
        found = [at for stop in self._stop if (at := self._text.find(stop, begin)) >= 0]
        if found:
            self._text = self._text[: min(found)]
            self.stopped = final = True
        held = 0 if final else self._held_back()
        end = max(len(self._text) - held, self._sent)
        out = self._text[self._sent : end]
        self._sent = end
        return out

    def _held_back(self) -> int:
        """Length of the longest tail of the text that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:size]):
                    longest = size
                    break
        return longest

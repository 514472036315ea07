"""Chat prompts in which only the template's own control tokens are control tokens.

A template joins its own text with strings of the conversation. Before it sees these, a mark that
nobody can guess is put into every control token that one of them spells, so what the template makes
of a string (trimming, splitting, joining) goes on working. In the rendered text control tokens
without a mark are the template's. The text between two of them is plain wherever it has a mark.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from effinfer.text.messages import Message, check_messages

if TYPE_CHECKING:
    from effinfer.text.chat import ChatTemplate
    from effinfer.text.tokenizer import Tokenizer

# Names of a template's environment that a program may set: they are the template's own.
_TRUSTED = {"bos_token", "eos_token"}
_MARK_CHARACTERS = 4


class ControlTokens:
    """How a tokenizer's control tokens are spelled."""

    def __init__(self, spellings: Iterable[str]) -> None:
        tokens = [token for token in spellings if token]
        pattern = _alternatives(tokens)
        self.pattern = re.compile(f"({pattern})") if tokens else None
        # Templates may change case before they print.
        self._spelled = re.compile(pattern, re.IGNORECASE) if tokens else None
        self._beginnings = {
            token[:size].lower() for token in tokens for size in range(1, len(token))
        }
        self._longest = max(map(len, tokens), default=1)

    def hide(self, value: Any, mark: str) -> Any:
        """`value` with the mark inside every control token that its strings spell or begin at
        their end, where another string may complete it."""
        if isinstance(value, str):
            return self._hide_text(value, mark)
        if isinstance(value, Mapping):
            return {self.hide(key, mark): self.hide(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item, mark) for item in value]
        return value

    def _hide_text(self, text: str, mark: str) -> str:
        if self._spelled is None:
            return text
        while self._spelled.search(text):  # hiding one may leave another that overlaps it
            text = self._spelled.sub(lambda found: found[0][0] + mark + found[0][1:], text)
        body = text.rstrip()
        sizes = range(1, min(self._longest, len(body) + 1))
        if any(body[-size:].lower() in self._beginnings for size in sizes):
            return body + mark + text[len(body) :]
        return text


def chat_tokens(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Sequence[Message],
    variables: Mapping[str, Any],
) -> list[int]:
    """Token ids of a conversation, up to where the answer begins."""
    control = tokenizer.control_tokens
    mark = "".join(chr(0xF0000 + secrets.randbelow(0xFFFE)) for _ in range(_MARK_CHARACTERS))
    hidden = [
        {key: value if key == "role" else control.hide(value, mark) for key, value in each.items()}
        for each in check_messages(messages)
    ]
    rest = {
        name: value if name in _TRUSTED else control.hide(value, mark)
        for name, value in variables.items()
    }
    text = template.render(hidden, **rest)
    # A template writes BOS itself where the model wants it.
    if mark not in text or control.pattern is None:
        return tokenizer.encode(text, add_special=False)
    ids: list[int] = []
    clean = ""
    for piece in control.pattern.split(text):
        if mark not in piece:
            clean += piece
            continue
        ids += tokenizer.encode(clean, add_special=False) if clean else []
        plain = piece.replace(mark, "")
        ids += tokenizer.encode(plain, add_special=False, parse_special=False)
        clean = ""
    return ids + (tokenizer.encode(clean, add_special=False) if clean else [])


def _alternatives(words: Sequence[str]) -> str:
    """A pattern of `words`, the longest first where one begins another: as a tree, so that its
    time does not grow with their number."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = {}
    return _pattern_of(tree)


def _pattern_of(tree: dict[str, Any]) -> str:
    prefix = ""
    while len(tree) == 1 and "" not in tree:  # a chain of letters needs no group
        ((letter, tree),) = tree.items()
        prefix += re.escape(letter)
    branches = [re.escape(letter) + _pattern_of(rest) for letter, rest in tree.items() if letter]
    if not branches:
        return prefix
    return f"{prefix}(?:{'|'.join(branches)})" + ("?" if "" in tree else "")

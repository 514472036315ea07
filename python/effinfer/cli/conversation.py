"""A conversation as it is kept, shortened and stored."""

import json
from pathlib import Path
from typing import Any

from effinfer import _core
from effinfer.cli import texts
from effinfer.llm import LLM
from effinfer.text.messages import check_messages

# Of a context, what is kept free for the answer at least, if the question leaves so much.
_SHARE_OF_ANSWER = 4


class Conversation:
    """Messages that alternate between user and assistant, perhaps after one of the system."""

    def __init__(self, llm: LLM, system: str | None) -> None:
        self._llm = llm
        self.system = system
        self.turns: list[dict[str, Any]] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return system + self.turns

    def ask(self, question: str) -> None:
        self.turns.append({"role": "user", "content": question})

    def answer(self, text: str) -> None:
        self.turns.append({"role": "assistant", "content": text})

    def take_back(self) -> str | None:
        """Removes the last question and its answer; returns the question."""
        while self.turns:
            turn = self.turns.pop()
            if turn["role"] == "user":
                return str(turn["content"])
        return None

    def fit(self, max_tokens: int) -> int:
        """Drops the oldest questions and answers until the rest leaves room for an answer; returns
        how many. Throws InvalidArgumentError when the last question alone fills the context."""
        context = self._llm.max_seq_len
        room = min(max_tokens, context // _SHARE_OF_ANSWER)
        dropped = 0
        while True:
            size = len(self._llm.chat_tokens(self.messages))
            if size + room <= context:
                return dropped
            later = [i for i, turn in enumerate(self.turns) if i and turn["role"] == "user"]
            if not later:
                break
            del self.turns[: later[0]]
            dropped += 1
        if size >= context:
            raise _core.InvalidArgumentError(
                f"[chat] the message has {size} tokens; the context holds {context}"
            )
        return dropped

    def save(self, path: Path) -> None:
        """Throws FileError."""
        text = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1)
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise _core.FileError(f"[chat] {path}: {error.strerror}") from None

    def load(self, path: Path) -> None:
        """What save() wrote, or a bare list of messages. Throws FileError, FormatError,
        InvalidArgumentError, and leaves the conversation as it was."""
        try:
            value: Any = json.loads(texts.read_file(path))
            value = value["messages"] if isinstance(value, dict) else value
        except (ValueError, RecursionError, KeyError):
            raise _core.FormatError(f"[chat] {path}: expected the JSON of a conversation") from None
        messages = check_messages(value)
        has_system = messages[0]["role"] == "system"
        self.system = messages[0]["content"] if has_system else None
        self.turns = messages[1:] if has_system else messages

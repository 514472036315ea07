"""effinfer chat."""

import contextlib
import secrets
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from effinfer import _core
from effinfer.cli import options as o
from effinfer.cli import texts
from effinfer.cli.answers import Printer
from effinfer.cli.conversation import Conversation
from effinfer.cli.output import Told, note
from effinfer.llm import LLM

_CHAT = replace(o.SAMPLING, max_tokens=1024)
_HELP = """\
/clear         forget the conversation
/system TEXT   the system message from now on; without a text, none
/regen         answer the last question again
/save FILE     write the conversation to a JSON file
/load FILE     go on with one that was saved
/exit          end, as Ctrl-D does; Ctrl-C stops an answer
A message that begins with a slash is written with a space before it."""
_LEAVE = "Ctrl-D or /exit ends the conversation."


@o.expanded()
def chat(
    message: Annotated[
        str | None, typer.Argument(help="Ask once; without it, talk interactively.")
    ] = None,
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    engine: o.EngineOptions = o.ENGINE,
    sampling: o.SamplingOptions = _CHAT,
    as_json: o.JsonOption = False,
    quiet: o.QuietOption = False,
) -> None:
    """Talk with a model; /help lists what else there is to type."""
    given = sampling.given()
    llm = engine.load()
    _ = llm.chat_template  # a model without one is refused before somebody types
    session = _Session(llm, system, given, Printer(llm, as_json, quiet))
    if message is not None:
        session.question(message)
        return
    if sys.stdin is not None and sys.stdin.isatty():
        session.talk(quiet or as_json)
    else:
        session.read()


class _Session:
    def __init__(
        self, llm: LLM, system: str | None, given: dict[str, Any], printer: Printer
    ) -> None:
        self._llm = llm
        self._given = given
        self._printer = printer
        self._conversation = Conversation(llm, system)

    def question(self, text: str, **changed: Any) -> None:
        """Answers it, with some parameters changed. One that cannot be answered leaves the
        conversation as it was."""
        kept = list(self._conversation.turns)
        self._conversation.ask(text)
        try:
            dropped = self._conversation.fit(self._given["max_tokens"])
            if dropped:
                turns = "turn" if dropped == 1 else f"{dropped} turns"
                note(f"[the context is full: forgot the oldest {turns}]")
            stream = self._llm.stream_chat(
                self._conversation.messages, **{**self._given, **changed}
            )
        except _core.Error:
            self._conversation.turns = kept
            raise
        try:
            self._printer.show(stream)
        finally:
            self._conversation.answer(stream.text)

    def read(self) -> None:
        """Questions from a pipe, a line each. Throws the last error when all were read."""
        failure: Exception | None = None
        for line in _piped_lines():
            try:
                if not self._line(line):
                    break
            except (_core.Error, Told) as error:
                if isinstance(error, Told) and error.code == 130:
                    raise
                if isinstance(failure, _core.Error):
                    note(f"effinfer: error: {failure}")
                failure = error
        if failure is not None:
            raise failure

    def talk(self, quiet: bool) -> None:
        """Questions of a person. Ctrl-C stops the answer, errors end nothing."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() edits lines with it)
        if not quiet:
            note(f"/help lists commands. {_LEAVE}")
        while self._typed_line(quiet):
            pass

    def _typed_line(self, quiet: bool) -> bool:
        try:
            return self._line(input("> "))
        except EOFError:
            note("")
            return False
        except KeyboardInterrupt:
            note("" if quiet else f"[{_LEAVE}]")
        except UnicodeError:
            note("effinfer: error: the line is no UTF-8 text")
        except Told:
            pass
        except _core.Error as error:
            note(f"effinfer: error: {error}")
        return True

    def _line(self, line: str) -> bool:
        """Heeds what was typed; False ends the conversation."""
        text = line.strip()
        if not line.startswith("/"):
            if text:
                self.question(text)
            return True
        command, _, argument = text.partition(" ")
        if command in ("/exit", "/quit", "/bye"):
            return False
        self._heed(command, argument.strip())
        return True

    def _heed(self, command: str, argument: str) -> None:
        conversation = self._conversation
        if command == "/help":
            note(_HELP)
        elif command == "/clear":
            conversation.turns.clear()
        elif command == "/system":
            conversation.system = argument or None
        elif command == "/regen":
            question = conversation.take_back()
            if question is None:
                note("[there is no question yet]")
            else:
                self.question(question, seed=secrets.randbits(32))
        elif command in ("/save", "/load"):
            if not argument:
                note(f"[{command} wants a file]")
                return
            path = Path(argument).expanduser()
            conversation.save(path) if command == "/save" else conversation.load(path)
            note(f"[{len(conversation.messages)} messages: {path}]")
        else:
            note(f"[{command} is no command: /help lists them; a space before it sends it]")


def _piped_lines() -> Iterator[str]:
    if sys.stdin is not None:
        for number, line in enumerate(sys.stdin.buffer, 1):
            yield texts.decode(line, f"standard input, line {number}")

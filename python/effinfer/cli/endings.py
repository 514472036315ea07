"""How a command ends that did not succeed: its exit code, and what it says."""

import logging
from dataclasses import dataclass

import typer

from effinfer import _core
from effinfer.cli.output import Interrupted, note, print_json
from effinfer.foreign_names import hint, loading_hint

_log = logging.getLogger(__name__)

# The base of what the parser of command lines raises; newer Typers carry their own copy of Click.
_ClickException = typer.BadParameter.__mro__[2]


@dataclass(frozen=True)
class Ending:
    code: int
    kind: str  # the error's class
    message: str
    advice: str = ""

    def tell(self, *, as_json: bool) -> None:
        """On stderr, and with `as_json` as an object on stdout."""
        if self.message and self.code != 130:
            note(f"effinfer: error: {self.message}")
        if self.advice:
            note(self.advice)
        if as_json:
            print_json({"error": self.message, "error_type": self.kind})


def ending_of(error: BaseException) -> Ending:
    """What an exception means for who typed the command."""
    kind = type(error).__name__
    message = " ".join(str(error).split())
    if isinstance(error, KeyboardInterrupt | Interrupted | typer.Abort):
        return Ending(130, "Interrupted", "interrupted")
    if isinstance(error, _ClickException):
        return _wrong_usage(error, kind)
    if isinstance(error, _core.InvalidArgumentError):
        return Ending(2, kind, message)
    if isinstance(error, _core.Error | OSError):
        return Ending(1, kind, message)
    _log.debug("internal error", exc_info=error)
    return Ending(1, kind, f"internal error: {kind}: {message}", "-vv shows where it happened")


def _wrong_usage(error: BaseException, kind: str) -> Ending:
    message = " ".join(error.format_message().split())  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "effinfer"
    option = getattr(error, "option_name", "") if kind == "NoSuchOption" else ""
    known = {name for each in context.command.params for name in each.opts} if context else set()
    meant = _option_meant(option, known)
    if meant:
        message = f"No such option: {option}; {meant}"
    elif option and (" " in option or not option.startswith("--")):
        message += "; a prompt that begins with a dash comes after `--`"
    return Ending(2, kind, message, f"Try '{command} --help' for help.")


def _option_meant(option: str, known: set[str]) -> str | None:
    """What another program's option is called here, if the command has it."""
    name = option.lstrip("-")
    if name in ("c", "ctx-size"):  # as llama.cpp's
        name = "n_ctx"
    meant = hint(name) or loading_hint(name.replace("-", "_"))
    if meant is None:
        return None
    first, word, rest = meant.partition("mean ")
    option = f"--{rest.replace('_', '-')}"
    is_known = any(option.startswith(each) for each in known if each.startswith("--"))
    return f"{first}{word}{option}" if is_known else None

"""effinfer generate."""

from typing import Annotated

import typer

from effinfer.cli import options as o
from effinfer.cli import texts
from effinfer.cli.answers import Printer
from effinfer.cli.output import note


@o.expanded()
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="The text to continue; - or nothing reads standard input. One that begins with a "
            "dash comes after --."
        ),
    ] = None,
    engine: o.EngineOptions = o.ENGINE,
    sampling: o.SamplingOptions = o.SAMPLING,
    as_json: o.JsonOption = False,
    quiet: o.QuietOption = False,
) -> None:
    """Continue a text."""
    given = sampling.given()
    text = _prompt(prompt)
    llm = engine.load()
    if llm.has_chat_template and not quiet:
        note("[a model that chats: generate continues the text as it stands, `effinfer chat` asks]")
    Printer(llm, as_json, quiet).show(llm.stream(text, **given))


def _prompt(given: str | None) -> str:
    if given == "-" or (given is None and texts.is_piped()):
        given = texts.read_stdin().removesuffix("\n")  # `echo` ends its text so
        if given == "":
            raise typer.BadParameter("standard input is empty", param_hint="'prompt'")
    if given is None:
        raise typer.BadParameter(
            "expected a text, or one piped to standard input", param_hint="'prompt'"
        )
    return given

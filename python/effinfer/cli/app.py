"""The commands of `effinfer`."""

from typing import Annotated

import typer

from effinfer.cli import chat, generate, inspect, measure, models, quantize, serve, techniques
from effinfer.cli.commands import Command, Group

app = typer.Typer(
    name="effinfer",
    help="Efficient LLM inference on the hardware that you have.",
    cls=Group,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        from effinfer import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Efficient LLM inference on the hardware that you have."""


for name, command in {
    "generate": generate.generate,
    "chat": chat.chat,
    "serve": serve.serve,
    "pull": models.pull,
    "list": models.list_models,
    "remove": models.remove,
    "inspect": inspect.inspect,
    "compile": models.compile_model,
    "quantize": quantize.quantize,
    "info": models.info,
    "bench": measure.bench,
    "perplexity": measure.perplexity,
    "techniques": techniques.techniques,
}.items():
    app.command(name, cls=Command)(command)

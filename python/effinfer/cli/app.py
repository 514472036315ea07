"""The commands of `effinfer`."""

from typing import Annotated

import typer

from effinfer.cli import generate, inspect, measure, models, quantize, serve

app = typer.Typer(
    name="effinfer",
    help="Efficient LLM inference on the hardware that you have.",
    no_args_is_help=True,
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


app.command("generate")(generate.generate)
app.command("chat")(generate.chat)
app.command("serve")(serve.serve)
app.command("pull")(models.pull)
app.command("inspect")(inspect.inspect)
app.command("compile")(models.compile_model)
app.command("quantize")(quantize.quantize)
app.command("info")(models.info)
app.command("bench")(measure.bench)
app.command("perplexity")(measure.perplexity)

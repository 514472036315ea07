"""effinfer serve."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from effinfer import _core
from effinfer.cli import options as o
from effinfer.cli.messages import log_with_times

if TYPE_CHECKING:
    from effinfer.async_llm import AsyncLLM


@o.expanded()
def serve(
    engine: o.EngineOptions = o.ENGINE,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="EFFINFER_API_KEY", help="What clients have to say; better in the environment."
        ),
    ] = None,
    alias: Annotated[str | None, typer.Option(help="The model's name for clients.")] = None,
    max_sequences: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 64,
    max_waiting: Annotated[
        int, typer.Option(min=0, help="Requests that wait beside them; more are refused.")
    ] = 256,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="For running requests to end, after SIGTERM.")
    ] = 30.0,
    tool_parser: Annotated[
        str | None,
        typer.Option(
            help="How the model calls tools: hermes, llama3, mistral, gemma; by default what its "
            "chat template tells."
        ),
    ] = None,
    log_text: Annotated[bool, typer.Option("--log-text", help="Log what the model says.")] = False,
) -> None:
    """Serve a model to programs that speak OpenAI's API."""
    try:
        from effinfer.serve.served import Served
        from effinfer.serve.server import ServerOptions
        from effinfer.serve.server import serve as run
        from effinfer.serve.tools import FORMATS
    except ModuleNotFoundError as error:
        raise _core.UnsupportedError(
            f"[serve] {error.name} is not installed: pip install 'effinfer[serve]'"
        ) from None
    if tool_parser is not None and tool_parser not in FORMATS:
        raise _core.InvalidArgumentError(
            f"[serve] --tool-parser: expected one of {', '.join(FORMATS)}, got {tool_parser!r}"
        )
    if api_key == "":
        raise _core.InvalidArgumentError("[serve] --api-key: expected some text")
    log_with_times()

    def load() -> "AsyncLLM":
        from effinfer.async_llm import AsyncLLM

        llm = AsyncLLM(**vars(engine), max_sequences=max_sequences, max_waiting=max_waiting)
        _ = llm.tokenizer, llm.default_params  # now, not in the first request
        return llm

    names = [alias or _short_name(engine.model), engine.model]
    served = Served(
        names=list(dict.fromkeys(names)),
        api_key=api_key,
        log_text=log_text,
        tool_parser=tool_parser,
    )
    status = run(served, load, ServerOptions(host, port, drain_seconds))
    if status:
        sys.exit(status)


def _short_name(model: str) -> str:
    """Names go to clients; where a file lies does not concern them."""
    return Path(model).stem if os.sep in model else model

"""effinfer generate, effinfer chat."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from effinfer.cli import options as o
from effinfer.llm import LLM
from effinfer.outputs import RequestOutput
from effinfer.requests.generation import TextStream

_CHAT = replace(o.SAMPLING, max_tokens=1024, temperature=0.6, top_p=0.95)


@o.expanded()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads stdin.")],
    engine: o.EngineOptions = o.ENGINE,
    sampling: o.SamplingOptions = o.SAMPLING,
    as_json: o.JsonOption = False,
    quiet: o.QuietOption = False,
) -> None:
    """Continue a text."""
    params = sampling.params()
    text = sys.stdin.read() if prompt == "-" else prompt
    llm = engine.load()
    _show(llm, llm.stream(text, params), as_json, quiet)


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
    """Talk with a model. Ctrl-C stops an answer; Ctrl-D or /exit ends the conversation."""
    params = sampling.params()
    llm = engine.load()
    messages = [{"role": "system", "content": system}] if system else []
    if message is not None:
        messages.append({"role": "user", "content": message})
        _show(llm, llm.stream_chat(messages, params), as_json, quiet)
        return
    for question in _questions(quiet or as_json):
        messages.append({"role": "user", "content": question})
        stream = llm.stream_chat(messages, params)
        try:
            _show(llm, stream, as_json, quiet)
        except KeyboardInterrupt:
            o.note("")
            if as_json:
                o.print_json({"text": stream.text, "finish_reason": "cancelled"})
        messages.append({"role": "assistant", "content": stream.text})


def _questions(quiet: bool) -> Iterator[str]:
    """Lines that the person types; Ctrl-C at the prompt discards the line."""
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() edits lines with it)
        if not quiet:
            o.note("Ctrl-C stops an answer; Ctrl-D or /exit ends the conversation.")
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            o.note("")
            continue
        if line == "/exit":
            return
        if line:
            yield line


def _show(llm: LLM, stream: TextStream, as_json: bool, quiet: bool) -> None:
    """Prints an answer as it comes, or one JSON object at its end; statistics go to stderr."""
    with contextlib.closing(stream):
        for piece in stream:
            if not as_json:
                print(piece, end="", flush=True)
    output = stream.output()
    if as_json:
        o.print_json(_to_dict(output))
    else:
        print(flush=True)
    if not quiet:
        o.note(_statistics(llm, output))


def _statistics(llm: LLM, output: RequestOutput) -> str:
    metrics = output.metrics
    cached = f" ({metrics.cached_tokens} cached)" if metrics.cached_tokens else ""
    drafts = metrics.speculation
    accepted = (
        f", {drafts.accepted / drafts.steps:.2f} of {drafts.drafted / drafts.steps:.2f} drafts "
        f"accepted in {drafts.steps} steps"
        if drafts.steps
        else ""
    )
    return (
        f"[load {llm.load_s:.2f} s; prompt {metrics.prompt_tokens} tokens{cached}, first token "
        f"after {metrics.time_to_first_token_s * 1e3:.0f} ms; {metrics.output_tokens} tokens, "
        f"{metrics.decode_tok_s:.1f} tok/s{accepted}; {output.finish_reason}]"
    )


def _to_dict(output: RequestOutput) -> dict[str, Any]:
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "seed": output.seed,
        "metrics": {**asdict(output.metrics), "decode_tok_s": output.metrics.decode_tok_s},
    }

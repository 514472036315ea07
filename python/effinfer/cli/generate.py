"""effinfer generate, effinfer chat."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import typer

from effinfer.cli import options as o
from effinfer.llm import LLM
from effinfer.outputs import RequestOutput
from effinfer.requests.generation import TextStream
from effinfer.sampling import SamplingParams


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads stdin.")],
    model: o.ModelOption = o.DEFAULT,
    max_tokens: o.MaxTokensOption = 128,
    temperature: o.TemperatureOption = 0.0,
    top_k: o.TopKOption = 0,
    top_p: o.TopPOption = 1.0,
    min_p: o.MinPOption = 0.0,
    typical_p: o.TypicalPOption = 1.0,
    repetition_penalty: o.RepetitionOption = 1.0,
    frequency_penalty: o.FrequencyOption = 0.0,
    presence_penalty: o.PresenceOption = 0.0,
    seed: o.SeedOption = 0,
    stop: o.StopOption = None,
    ignore_eos: o.IgnoreEosOption = False,
    threads: o.ThreadsOption = None,
    precision: o.PrecisionOption = "fast",
    deterministic: o.DeterministicOption = False,
    pack_cache: o.PackCacheOption = False,
    ternary_packing: o.TernaryPackingOption = "auto",
    head: o.HeadOption = None,
    prefill: o.PrefillOption = "dense",
    kv_dtype: o.KvDtypeOption = None,
    max_seq_len: o.ContextOption = None,
    as_json: o.JsonOption = False,
    quiet: o.QuietOption = False,
) -> None:
    """Continue a text."""
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        seed=seed,
        max_tokens=max_tokens,
        stop=stop or (),
        ignore_eos=ignore_eos,
    )
    params.to_core()  # a wrong value is found before the model is loaded
    text = sys.stdin.read() if prompt == "-" else prompt
    llm = LLM(
        model,
        threads=threads,
        precision=precision,
        deterministic=deterministic,
        kv_dtype=kv_dtype,
        max_seq_len=max_seq_len,
        pack_cache=pack_cache,
        ternary_packing=ternary_packing,
        head=head,
        prefill=prefill,
    )
    _show(llm, llm.stream(text, params), as_json, quiet)


def chat(
    message: Annotated[
        str | None, typer.Argument(help="Ask once; without it, talk interactively.")
    ] = None,
    model: o.ModelOption = o.DEFAULT,
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    max_tokens: o.MaxTokensOption = 1024,
    temperature: o.TemperatureOption = 0.6,
    top_k: o.TopKOption = 0,
    top_p: o.TopPOption = 0.95,
    min_p: o.MinPOption = 0.0,
    repetition_penalty: o.RepetitionOption = 1.0,
    seed: o.SeedOption = 0,
    ignore_eos: o.IgnoreEosOption = False,
    threads: o.ThreadsOption = None,
    precision: o.PrecisionOption = "fast",
    deterministic: o.DeterministicOption = False,
    pack_cache: o.PackCacheOption = False,
    ternary_packing: o.TernaryPackingOption = "auto",
    head: o.HeadOption = None,
    prefill: o.PrefillOption = "dense",
    kv_dtype: o.KvDtypeOption = None,
    max_seq_len: o.ContextOption = None,
    as_json: o.JsonOption = False,
    quiet: o.QuietOption = False,
) -> None:
    """Talk with a model. Ctrl-C stops an answer; Ctrl-D or /exit ends the conversation."""
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
    )
    params.to_core()
    llm = LLM(
        model,
        threads=threads,
        precision=precision,
        deterministic=deterministic,
        kv_dtype=kv_dtype,
        max_seq_len=max_seq_len,
        pack_cache=pack_cache,
        ternary_packing=ternary_packing,
        head=head,
        prefill=prefill,
    )
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
    return (
        f"[load {llm.load_s:.2f} s; prompt {metrics.prompt_tokens} tokens{cached}, first token "
        f"after {metrics.time_to_first_token_s * 1e3:.0f} ms; {metrics.output_tokens} tokens, "
        f"{metrics.decode_tok_s:.1f} tok/s; {output.finish_reason}]"
    )


def _to_dict(output: RequestOutput) -> dict[str, Any]:
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "metrics": {**asdict(output.metrics), "decode_tok_s": output.metrics.decode_tok_s},
    }

"""effinfer bench, effinfer perplexity."""

import logging
import resource
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from effinfer import _core
from effinfer.cli import options as o
from effinfer.cli import profile as profiling
from effinfer.cli import speculate, texts
from effinfer.cli.output import note, print_json
from effinfer.hub.progress import runs_bar
from effinfer.llm import LLM
from effinfer.sampling import SamplingParams

_SEED = 1
_log = logging.getLogger(__name__)


@o.expanded(without=("max_seq_len",))
def bench(
    engine: o.EngineOptions = o.ENGINE,
    pp: Annotated[int, typer.Option("--pp", min=1, help="Tokens of the prompt.")] = 512,
    tg: Annotated[int, typer.Option("--tg", min=1, help="Tokens to generate.")] = 128,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Measured runs.")] = 5,
    profile: Annotated[
        bool, typer.Option("--profile", help="Time, bytes and rates by kernel, on stderr.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", help="Write a trace of a few steps, for Perfetto.", dir_okay=False),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            "--prompt-file",
            help="With --speculate: the text to go on from; by default an edit of a source file.",
            exists=True,
            dir_okay=False,
        ),
    ] = None,
    as_json: o.JsonOption = False,
) -> None:
    """Measure speed.

    A prompt of random tokens, then generation from an empty context. With --speculate also
    generation of a text with drafts and without.
    """
    longest = max(pp + (profiling.TRACED_DRAFTED if trace else 1), tg + 2)
    speculates = engine.speculation not in (None, "off")
    if prompt_file and not speculates:
        raise _core.InvalidArgumentError("[bench] --prompt-file: expected --speculate with it")
    text = speculate.prompt_of(engine.model, prompt_file) if speculates else []
    longest = max(longest, len(text) + tg + 2)
    llm = engine.load(max_seq_len=longest, prefix_cache=False)
    prompt = np.random.default_rng(_SEED).integers(0, llm.vocab_size, pp).tolist()
    prefills: list[float] = []
    decodes: list[float] = []
    with runs_bar() as report:
        for run in range(repeat + 1):
            pp_rate = pp / _run(llm, prompt, 1)["time_to_first_token_s"]
            metrics = _run(llm, prompt[:1], tg + 1)
            tg_rate = tg / (metrics["total_s"] - metrics["time_to_first_token_s"])
            if run > 0:  # the first run touches memory and wakes the cores
                prefills.append(pp_rate)
                decodes.append(tg_rate)
            rates = f"prefill {pp_rate:.1f} tok/s, decode {tg_rate:.1f} tok/s"
            report(rates, run, repeat)
            _log.info("run %d: %s", run, rates)
    result: dict[str, Any] = {
        "model": engine.model,
        "device": engine.device,
        "threads": llm.threads,
        "isa": _core.current_isa(),
        "pp": pp,
        "tg": tg,
        "pp_tok_s": _summary(prefills),
        "tg_tok_s": _summary(decodes),
        "load_s": llm.load_s,
        "pack_cache": llm.engine.pack_cache.state,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    run_one = partial(_run, llm)
    if text:
        result["speculation"] = speculate.measure(llm, text, max(tg, 2), repeat)
    if profile:
        result["profile"] = profiling.profile(llm, run_one, prompt, tg)
    if trace is not None:
        traced_run = partial(_run, llm, drafts=engine.draft_device is not None)
        result["drafts_overlapped"] = profiling.write_trace(llm, traced_run, prompt, trace)
    if as_json:
        print_json(result)
    else:
        _print_rates(result)
        if text:
            speculate.print_gain(str(engine.speculation), result["speculation"])
        for name, share in result.get("drafts_overlapped", {}).items():
            print(f"{name}: {share:.0%} of its time beside steps of the target")
    if profile and not as_json:
        profiling.print_profile(result["profile"])


def _print_rates(result: dict[str, Any]) -> None:
    where = f"{result['threads']} threads, {result['isa']}"
    if not result["device"].startswith("cpu") or "+" in result["device"]:
        where = result["device"]
    print(f"{result['model']}: {where}, load {result['load_s']:.2f} s")
    for name, key in (("prefill", "pp"), ("decode", "tg")):
        rates = result[f"{key}_tok_s"]
        print(
            f"{name:<8}{result[key]:>5} tokens {rates['median']:>9.1f} tok/s "
            f"({rates['min']:.1f} to {rates['max']:.1f})"
        )


def _run(llm: LLM, prompt: list[int], max_tokens: int, *, drafts: bool = False) -> dict[str, Any]:
    """Metrics of one greedy request, without a tokenizer, or drafts unless asked for, in the
    way."""
    engine = llm.engine
    params = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, speculation=drafts
    )
    request = engine.add(prompt, params.to_core())
    while engine.has_work():
        for output in engine.step_many():
            if output.finish_reason == "error":
                raise _core.Error(output.error)
    metrics: dict[str, Any] = engine.metrics(request)
    engine.forget(request)
    return metrics


def _summary(rates: list[float]) -> dict[str, float]:
    return {"median": statistics.median(rates), "min": min(rates), "max": max(rates)}


@o.expanded(without=("max_seq_len", "speculation"))
def perplexity(
    file: Annotated[Path, typer.Argument(help="A text file.", exists=True, dir_okay=False)],
    engine: o.EngineOptions = o.ENGINE,
    ctx: Annotated[int, typer.Option("--ctx", min=2, help="Tokens of a window.")] = 512,
    as_json: o.JsonOption = False,
    quiet: o.QuietOption = False,
) -> None:
    """Measure how well a model expects a text.

    Prints exp of the mean negative log-likelihood of its tokens. The text is cut into windows of
    --ctx tokens; every token but the first of a window is scored, given those before it there.
    """
    text = texts.read_file(file)
    llm = engine.load(max_seq_len=ctx, prefix_cache=False)
    ids = llm.tokenize(text)
    if len(ids) < 2:
        raise _core.InvalidArgumentError(f"[perplexity] {file}: expected at least two tokens")
    started = time.perf_counter()
    total, count = 0.0, 0
    with runs_bar() as report:
        for begin in range(0, len(ids) - 1, ctx):
            window = ids[begin : begin + ctx]
            total += -float(llm.log_likelihoods(window).sum())
            count += len(window) - 1
            report(f"tokens: {np.exp(total / count):.4f}", begin + len(window), len(ids))
    result = {
        "perplexity": float(np.exp(total / count)),
        "nll": total / count,
        "tokens": count,
        "text_tokens": len(ids),
        "ctx": ctx,
        "seconds": time.perf_counter() - started,
        "model": engine.model,
    }
    if as_json:
        print_json(result)
    else:
        print(f"{result['perplexity']:.4f}")
    if not quiet:
        note(
            f"[{count} of {len(ids)} tokens scored, in windows of {ctx}; {result['seconds']:.1f} s]"
        )

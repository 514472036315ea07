"""Options that several commands share, and how results are printed."""

import functools
import inspect
import json
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, get_type_hints

import typer

from effinfer.hub.catalog import DEFAULT_MODEL
from effinfer.llm import LLM
from effinfer.sampling import SamplingParams

ModelOption = Annotated[
    str,
    typer.Option(
        "-m", "--model", help="Path, name (see `effinfer pull --list`) or hf:org/repo/file.gguf."
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option("-t", "--threads", min=1, help="Threads, at most the CPUs; default: see `info`."),
]
PrefillOption = Annotated[
    str,
    typer.Option(
        "--prefill",
        help="dense, or sparse for long prompts: minference, sample_attention, xattention.",
    ),
]
SpeculateOption = Annotated[
    str | None,
    typer.Option(
        "--speculate",
        help="Guess tokens and verify them, for the same text sooner: auto, suffix, ngram, "
        "recycling.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
QuietOption = Annotated[bool, typer.Option("-q", "--quiet", help="No statistics on stderr.")]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Arguments of LLM, by their names there."""

    model: ModelOption = DEFAULT_MODEL
    threads: ThreadsOption = None
    precision: Annotated[str, typer.Option(help="fast or f32.")] = "fast"
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Prefill in the arithmetic of decoding.")
    ] = False
    pack_cache: Annotated[
        bool,
        typer.Option(
            "--pack-cache",
            help="Keep the packed weights in the user's cache, and map them in later loads.",
        ),
    ] = False
    ternary_packing: Annotated[str, typer.Option(help="Of ternary weights: auto, t2 or t1_6.")] = (
        "auto"
    )
    head: Annotated[
        str | None,
        typer.Option(help="Type of the output matrix, such as q6_k; by default its own."),
    ] = None
    prefill: PrefillOption = "dense"
    kv_dtype: Annotated[str | None, typer.Option(help="KV cache: f32, f16, bf16 or i8.")] = None
    max_seq_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence at most.")
    ] = None
    speculation: SpeculateOption = None
    draft_model: Annotated[
        str | None, typer.Option(help="A smaller model of the same vocabulary, which drafts.")
    ] = None

    def load(self, **decided: Any) -> LLM:
        """The model; `decided` are arguments of LLM that the command does not leave to its
        caller."""
        return LLM(**{**vars(self), **decided})


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Fields of SamplingParams, by their names there."""

    max_tokens: Annotated[int, typer.Option("-n", "--max-tokens", help="Tokens at most.")] = 128
    temperature: Annotated[float, typer.Option(help="0: the likeliest token.")] = 0.0
    top_k: Annotated[int, typer.Option(help="0: off.")] = 0
    top_p: Annotated[float, typer.Option(help="1: off.")] = 1.0
    min_p: Annotated[float, typer.Option(help="0: off.")] = 0.0
    typical_p: Annotated[float, typer.Option(help="1: off.")] = 1.0
    repetition_penalty: Annotated[float, typer.Option(help="1: off.")] = 1.0
    frequency_penalty: Annotated[float, typer.Option(help="0: off.")] = 0.0
    presence_penalty: Annotated[float, typer.Option(help="0: off.")] = 0.0
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same text.")] = 0
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be repeated.")
    ] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end.")] = False

    def params(self) -> SamplingParams:
        """Checked, so that a wrong value is found before the model is loaded."""
        params = SamplingParams(**{**vars(self), "stop": self.stop or ()})
        params.to_core()
        return params


ENGINE = EngineOptions()
SAMPLING = SamplingOptions()


def expanded(*, without: Collection[str] = ()) -> Callable[[Callable[..., None]], Any]:
    """Decorates a command: in place of a parameter whose default is a dataclass of options, the
    command line has an option for each of its fields, with the defaults of that object. The fields
    named in `without` are no options."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        groups: dict[str, Any] = {}
        options: list[inspect.Parameter] = []
        for name, parameter in inspect.signature(command).parameters.items():
            if is_dataclass(parameter.default):
                groups[name] = parameter.default
                options += _options_of(parameter.default, without)
            else:
                options.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

        @functools.wraps(command)
        def run(**given: Any) -> None:
            for name, group in groups.items():
                values = {f.name: given.pop(f.name) for f in fields(group) if f.name in given}
                given[name] = replace(group, **values)
            command(**given)

        run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        run.__annotations__ = {option.name: option.annotation for option in options}
        return run

    return decorate


def _options_of(group: Any, without: Collection[str]) -> list[inspect.Parameter]:
    types = get_type_hints(type(group), include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=getattr(group, field.name),
            annotation=types[field.name],
        )
        for field in fields(group)
        if field.name not in without
    ]


def print_json(value: Any) -> None:
    """One line on stdout."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def note(text: str) -> None:
    """A line for the person at the terminal."""
    print(text, file=sys.stderr, flush=True)

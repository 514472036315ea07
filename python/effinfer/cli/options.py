"""Options that several commands share."""

import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Annotated, Any, get_type_hints

import typer

from effinfer.cli.messages import be_verbose
from effinfer.cli.output import Interrupted
from effinfer.hub.catalog import DEFAULT_MODEL
from effinfer.llm import LLM
from effinfer.sampling import SamplingParams

ModelOption = Annotated[
    str,
    typer.Option(
        "-m",
        "--model",
        help="File, folder, name (see `effinfer list`) or hub repository: org/repo[:Q4_K_M].",
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option("-t", "--threads", min=1, help="Threads, at most the CPUs; default: see `info`."),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        help="cpu, cpu:0-3 (cores), cuda, cuda:1, or auto: a GPU if any; cpu+cuda: the first "
        "layers here, the others there.",
    ),
]
PrefillOption = Annotated[
    str,
    typer.Option(
        "--prefill",
        help="dense, or sparse for long prompts: minference, sample_attention, xattention.",
    ),
]
TechniquesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--techniques",
        metavar="NAME[,NAME]",
        show_default=False,
        help="Techniques, with their defaults, also in several options; `effinfer techniques` "
        "lists them.",
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
_MODELS_OWN = "Default: what the model's makers recommend, else"
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
QuietOption = Annotated[bool, typer.Option("-q", "--quiet", help="No statistics on stderr.")]

VerboseOption = Annotated[
    int,
    typer.Option(
        "-v", "--verbose", count=True, show_default=False, help="Say what happens; -vv all of it."
    ),
]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Arguments of LLM, by their names there."""

    model: ModelOption = DEFAULT_MODEL
    threads: ThreadsOption = None
    device: DeviceOption = "cpu"
    gpu_layers: Annotated[
        int | None,
        typer.Option(min=0, help="Layers on the GPU of cpu+cuda; default: as many as it holds."),
    ] = None
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
    techniques: TechniquesOption = None
    kv_dtype: Annotated[str | None, typer.Option(help="KV cache: f32, f16, bf16 or i8.")] = None
    max_seq_len: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence at most.")
    ] = None
    speculation: SpeculateOption = None
    draft_model: Annotated[
        str | None, typer.Option(help="A smaller model of the same vocabulary, which drafts.")
    ] = None
    draft_device: Annotated[
        str | None,
        typer.Option(help="Where it does, beside the target: cpu:1 (cores), cuda:0."),
    ] = None

    def load(self, **decided: Any) -> LLM:
        """The model; `decided` are arguments of LLM that the command does not leave to its
        caller."""
        return LLM(**{**vars(self), **decided})


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Fields of SamplingParams, by their names there; None leaves them to the model."""

    max_tokens: Annotated[int, typer.Option("-n", "--max-tokens", help="Tokens at most.")] = 128
    temperature: Annotated[
        float | None, typer.Option(help=f"0: the likeliest token. {_MODELS_OWN} 1.")
    ] = None
    top_k: Annotated[int | None, typer.Option(help=f"0: off. {_MODELS_OWN} 0.")] = None
    top_p: Annotated[float | None, typer.Option(help=f"1: off. {_MODELS_OWN} 1.")] = None
    min_p: Annotated[float | None, typer.Option(help=f"0: off. {_MODELS_OWN} 0.")] = None
    typical_p: Annotated[float | None, typer.Option(help=f"1: off. {_MODELS_OWN} 1.")] = None
    repetition_penalty: Annotated[float | None, typer.Option(help=f"1: off. {_MODELS_OWN} 1.")] = (
        None
    )
    frequency_penalty: Annotated[float, typer.Option(help="0: off.")] = 0.0
    presence_penalty: Annotated[float, typer.Option(help="0: off.")] = 0.0
    seed: Annotated[
        int | None, typer.Option(min=0, help="Same seed, same text; by default a fresh one.")
    ] = None
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be repeated.")
    ] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end.")] = False

    def given(self) -> dict[str, Any]:
        """Fields of SamplingParams; those that are left to the model are not among them. Checked,
        so that a wrong value is found before the model is loaded."""
        fields = {name: value for name, value in vars(self).items() if value is not None}
        SamplingParams(**fields)
        return fields


ENGINE = EngineOptions()
SAMPLING = SamplingOptions()


def expanded(*, without: Collection[str] = ()) -> Callable[[Callable[..., None]], Any]:
    """Decorates a command: in place of a parameter whose default is a dataclass of options, the
    command line has an option for each of its fields, with the defaults of that object. The fields
    named in `without` are no options. Every command has -v."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        groups: dict[str, Any] = {}
        options: list[inspect.Parameter] = []
        for name, parameter in inspect.signature(command).parameters.items():
            if is_dataclass(parameter.default):
                groups[name] = parameter.default
                options += _options_of(parameter.default, without)
            else:
                options.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

        options.append(
            inspect.Parameter(
                "verbose", inspect.Parameter.KEYWORD_ONLY, default=0, annotation=VerboseOption
            )
        )

        @functools.wraps(command)
        def run(**given: Any) -> None:
            be_verbose(given.pop("verbose", 0))
            for name, group in groups.items():
                values = {f.name: given.pop(f.name) for f in fields(group) if f.name in given}
                given[name] = replace(group, **values)
            try:
                command(**given)
            except KeyboardInterrupt:
                raise Interrupted from None

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

"""Options that several commands share, and how results are printed."""

import json
import sys
from typing import Annotated, Any

import typer

from effinfer.hub.catalog import DEFAULT_MODEL

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
PrecisionOption = Annotated[str, typer.Option("--precision", help="fast or f32.")]
DeterministicOption = Annotated[
    bool, typer.Option("--deterministic", help="Prefill in the arithmetic of decoding.")
]
KvDtypeOption = Annotated[
    str | None, typer.Option("--kv-dtype", help="KV cache: f32, f16, bf16 or i8.")
]
PrefillOption = Annotated[
    str,
    typer.Option(
        "--prefill",
        help="dense, or sparse for long prompts: minference, sample_attention, xattention.",
    ),
]
ContextOption = Annotated[
    int | None, typer.Option("--max-seq-len", min=1, help="Tokens of a sequence at most.")
]
PackCacheOption = Annotated[
    bool,
    typer.Option(
        "--pack-cache",
        help="Keep the packed weights in the user's cache, and map them in later loads.",
    ),
]
TernaryPackingOption = Annotated[
    str, typer.Option("--ternary-packing", help="Of ternary weights: auto, t2 or t1_6.")
]
HeadOption = Annotated[
    str | None,
    typer.Option("--head", help="Type of the output matrix, such as q6_k; by default its own."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
QuietOption = Annotated[bool, typer.Option("-q", "--quiet", help="No statistics on stderr.")]

TemperatureOption = Annotated[float, typer.Option("--temperature", help="0: the likeliest token.")]
TopKOption = Annotated[int, typer.Option("--top-k", help="0: off.")]
TopPOption = Annotated[float, typer.Option("--top-p", help="1: off.")]
MinPOption = Annotated[float, typer.Option("--min-p", help="0: off.")]
TypicalPOption = Annotated[float, typer.Option("--typical-p", help="1: off.")]
RepetitionOption = Annotated[float, typer.Option("--repetition-penalty", help="1: off.")]
FrequencyOption = Annotated[float, typer.Option("--frequency-penalty", help="0: off.")]
PresenceOption = Annotated[float, typer.Option("--presence-penalty", help="0: off.")]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Same seed, same text.")]
MaxTokensOption = Annotated[int, typer.Option("-n", "--max-tokens", help="Tokens at most.")]
IgnoreEosOption = Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end.")]
StopOption = Annotated[
    list[str] | None, typer.Option("--stop", help="End before this text; may be repeated.")
]

DEFAULT = DEFAULT_MODEL


def print_json(value: Any) -> None:
    """One line on stdout."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def note(text: str) -> None:
    """A line for the person at the terminal."""
    print(text, file=sys.stderr, flush=True)

"""effinfer quantize."""

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from effinfer.checkpoints.quantization import QuantizeResult
from effinfer.checkpoints.quantization import quantize as quantize_model
from effinfer.cli import options as o
from effinfer.cli.output import note, print_json
from effinfer.hub.progress import resolve_with_bar, weights_bar


@o.expanded()
def quantize(
    output: Annotated[Path, typer.Option("-o", "--output", help="The GGUF file to write.")],
    kind: Annotated[
        str,
        typer.Option(
            "--type",
            help="Of the layers: t2, t1_6 (ternary), q4_k, q5_k, q6_k, q8_0, q4_0, q4_1, q5_0, "
            "q5_1, tq1_0, tq2_0, i2_s, bf16, f16 or f32.",
        ),
    ],
    model: o.ModelOption = o.ENGINE.model,
    head: Annotated[
        str | None,
        typer.Option("--head", help="Of embedding and output; default: --type, or q6_k."),
    ] = None,
    i2_s_order: Annotated[
        str, typer.Option("--i2s-order", help="Of a bitnet.cpp file: x86, arm or rows.")
    ] = "x86",
    threads: o.ThreadsOption = None,
    as_json: o.JsonOption = False,
    quiet: o.QuietOption = False,
) -> None:
    """Write a GGUF file with other weight types, from a GGUF file or a Hugging Face folder."""
    path = resolve_with_bar(model)
    with contextlib.nullcontext() if quiet else weights_bar() as bar:
        result = quantize_model(
            path,
            output,
            kind,
            head=head,
            i2_s_order=i2_s_order,
            threads=threads,
            progress=bar,
        )
    if as_json:
        print_json(result.to_dict())
    elif not quiet:
        _describe(result)


def _describe(result: QuantizeResult) -> None:
    groups: dict[tuple[str, str], list[float]] = {}
    for tensor in result.tensors:
        groups.setdefault((tensor.source_type, tensor.type), []).append(tensor.error)
    for (old, new), errors in groups.items():
        worst = max(errors)
        change = f"relative error {worst:.2g} at most" if worst else "the same values"
        note(f"{old} -> {new}: {len(errors)} tensors, {change}")
    before, after = result.source_bytes / 1e6, result.num_bytes / 1e6
    note(f"{result.path}: {after:.1f} MB, from {before:.1f} MB")

"""effinfer pull, effinfer compile, effinfer info."""

from pathlib import Path
from typing import Annotated

import typer

from effinfer import _core, hub
from effinfer.checkpoints.model_files import GRAPH_KEY, open_model
from effinfer.cli import options as o
from effinfer.hub.catalog import CATALOG
from effinfer.hub.progress import pull_with_bar, resolve_with_bar
from effinfer.machine import calibrate
from effinfer.machine import info as machine_info
from effinfer.techniques import as_prefill


def pull(
    name: Annotated[str | None, typer.Argument(help="A name of --list.")] = None,
    list_names: Annotated[bool, typer.Option("--list", help="List the known models.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Fetch again.")] = False,
    as_json: o.JsonOption = False,
) -> None:
    """Fetch a model into the cache."""
    if list_names:
        _list(as_json)
        return
    if name is None:
        known = ", ".join(sorted(CATALOG))
        raise typer.BadParameter(f"expected one of {known}, or --list", param_hint="NAME")
    entry = hub.find_entry(name)
    path = hub.local_path(entry)
    if force or not hub.is_pulled(entry):
        path = pull_with_bar(name, force=force)
    if as_json:
        o.print_json({"name": name, "path": str(path), "bytes": entry.num_bytes})
    else:
        print(path)


def _list(as_json: bool) -> None:
    if as_json:
        o.print_json(
            [
                {
                    "name": entry.name,
                    "bytes": entry.num_bytes,
                    "pulled": hub.is_pulled(entry),
                    "path": str(hub.local_path(entry)),
                }
                for entry in CATALOG.values()
            ]
        )
        return
    for entry in CATALOG.values():
        state = str(hub.local_path(entry)) if hub.is_pulled(entry) else "not pulled"
        print(f"{entry.name:<16}{entry.num_bytes / 1e6:>7.0f} MB  {state}")


def compile_model(
    source: Annotated[str, typer.Argument(metavar="IN", help="A GGUF file, or a name.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The artifact to write.")],
    prefill: o.PrefillOption = "dense",
    as_json: o.JsonOption = False,
) -> None:
    """Write an artifact: the GGUF file with the model's graph inside, which C++ programs load."""
    sparse = as_prefill(prefill)
    path = resolve_with_bar(source)
    files = open_model(path)
    if files.gguf is None:
        raise _core.UnsupportedError(
            f"[compile] {path}: expected a GGUF file; a folder has no single file to extend"
        )
    if output.exists() and output.samefile(path):
        raise _core.InvalidArgumentError("[compile] --output: expected another file than IN")
    graph = files.graph if sparse is None else sparse.apply(files.graph)
    _core.write_gguf_with_metadata(files.gguf, GRAPH_KEY, graph.to_string(), str(output))
    size = output.stat().st_size
    nodes = len(graph.nodes)
    if as_json:
        o.print_json({"path": str(output), "bytes": size, "nodes": nodes})
    else:
        o.note(f"{output}: {size / 1e6:.0f} MB, a graph of {nodes} nodes")


def info(
    as_json: o.JsonOption = False,
    calibrated: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine anew first.")
    ] = False,
) -> None:
    """What this machine offers and what effinfer will use."""
    if calibrated:
        calibrate()
    facts = machine_info()
    if as_json:
        o.print_json(facts.to_dict())
    else:
        print(facts)

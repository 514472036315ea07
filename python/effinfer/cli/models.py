"""effinfer pull, list, remove, compile, info."""

from pathlib import Path
from typing import Annotated

import typer

from effinfer import _core, hub
from effinfer.checkpoints.model_files import GRAPH_KEY, open_model
from effinfer.cli import options as o
from effinfer.cli.output import note, print_json
from effinfer.hub import repositories
from effinfer.hub.catalog import CATALOG
from effinfer.hub.progress import pull_with_bar, resolve_with_bar
from effinfer.hub.repository_name import is_name
from effinfer.machine import calibrate
from effinfer.machine import info as machine_info
from effinfer.techniques import Installed


@o.expanded()
def pull(
    name: Annotated[
        str | None,
        typer.Argument(help="A name of `effinfer list`, or a hub repository: org/repo[:Q4_K_M]."),
    ] = None,
    list_names: Annotated[bool, typer.Option("--list", help="As `effinfer list`.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Fetch a known model again.")] = False,
    as_json: o.JsonOption = False,
) -> None:
    """Fetch a model into the cache."""
    if list_names:
        _list(as_json)
        return
    if name is None:
        known = ", ".join(sorted(CATALOG))
        raise typer.BadParameter(f"expected one of {known}, or org/repo", param_hint="NAME")
    if name in CATALOG:
        is_there = hub.is_pulled(CATALOG[name]) and not force
        path = hub.local_path(CATALOG[name]) if is_there else pull_with_bar(name, force=force)
    elif is_name(name):
        path = resolve_with_bar(name if name.startswith("hf:") else f"hf:{name}")
    else:
        hub.find_entry(name)  # throws
    if as_json:
        print_json({"name": name, "path": str(path), "bytes": _bytes_of(path)})
    else:
        print(path)


@o.expanded()
def list_models(as_json: o.JsonOption = False) -> None:
    """List the known models and those of the hub that are here."""
    _list(as_json)


@o.expanded()
def remove(
    name: Annotated[str, typer.Argument(help="A name of `effinfer list`.")],
    as_json: o.JsonOption = False,
) -> None:
    """Delete a model from the cache."""
    freed = hub.remove(name)
    if as_json:
        print_json({"name": name, "freed_bytes": freed})
    else:
        note(f"{name}: {freed / 1e6:.0f} MB freed")


def _bytes_of(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _list(as_json: bool) -> None:
    rows = [
        {
            "name": entry.name,
            "bytes": entry.num_bytes,
            "pulled": hub.is_pulled(entry),
            "path": str(hub.local_path(entry)),
        }
        for entry in CATALOG.values()
    ]
    rows += [
        {"name": name, "bytes": size, "pulled": True, "path": str(folder)}
        for name, folder, size in repositories.cached()
    ]
    if as_json:
        print_json(rows)
        return
    width = max(len(str(row["name"])) for row in rows)
    for row in rows:
        state = row["path"] if row["pulled"] else "not pulled"
        print(f"{row['name']:<{width}}{int(str(row['bytes'])) / 1e6:>8.0f} MB  {state}")


@o.expanded()
def compile_model(
    source: Annotated[str, typer.Argument(metavar="IN", help="A GGUF file, or a name.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The artifact to write.")],
    prefill: o.PrefillOption = "dense",
    techniques: o.TechniquesOption = None,
    as_json: o.JsonOption = False,
) -> None:
    """Write an artifact: the GGUF file with the model's graph inside, which C++ programs load."""
    installed = Installed(techniques, prefill)
    path = resolve_with_bar(source)
    files = open_model(path)
    if files.gguf is None:
        raise _core.UnsupportedError(
            f"[compile] {path}: expected a GGUF file; a folder has no single file to extend"
        )
    if output.exists() and output.samefile(path):
        raise _core.InvalidArgumentError("[compile] --output: expected another file than IN")
    graph = installed.graph(files.graph)
    _core.write_gguf_with_metadata(files.gguf, GRAPH_KEY, graph.to_string(), str(output))
    size = output.stat().st_size
    nodes = len(graph.nodes)
    if as_json:
        print_json({"path": str(output), "bytes": size, "nodes": nodes})
    else:
        note(f"{output}: {size / 1e6:.0f} MB, a graph of {nodes} nodes")


@o.expanded()
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
        print_json(facts.to_dict())
    else:
        print(facts)

"""effinfer inspect."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from effinfer import _core
from effinfer.checkpoints.model_files import ModelFiles, open_model
from effinfer.cli import options as o
from effinfer.cli.output import print_json
from effinfer.files.paths import pack_cache_dir
from effinfer.hub.progress import resolve_with_bar

_SHOWN_ITEMS = 8
_SHOWN_CHARACTERS = 60


@o.expanded()
def inspect(
    model: Annotated[str, typer.Argument(help="A GGUF file, a folder, or a name.")],
    graph: Annotated[bool, typer.Option("--graph", help="Print the graph's text form.")] = False,
    as_json: o.JsonOption = False,
) -> None:
    """Show what a model holds: metadata, tensors with types and sizes, the graph."""
    path = resolve_with_bar(model)
    facts: dict[str, Any] = {"path": str(path)}
    if not path.is_dir():
        facts.update(_of_file(_core.GgufFile(str(path))))
    facts.update(_of_graph(path))
    if as_json:
        print_json(facts)
    elif not graph:
        _print(facts)
    elif facts["graph"] is None:
        raise _core.UnsupportedError(facts["graph_error"])
    else:
        print(facts["graph"])


def _of_file(file: _core.GgufFile) -> dict[str, Any]:
    return {
        "format": f"GGUF {file.version}",
        "bytes": file.file_bytes,
        "metadata": {key: _plain(file, key) for key in file.keys()},  # noqa: SIM118
        "tensors": [
            {"name": t.name, "type": t.type_name, "shape": list(t.shape), "bytes": t.num_bytes}
            for t in file.tensors()
        ],
    }


def _plain(file: _core.GgufFile, key: str) -> Any:
    """A value for people: long arrays are described, not shown."""
    kind = file.value_type(key)
    if not kind.startswith("array"):
        return file.get(key)
    size = file.array_size(key)
    if size > _SHOWN_ITEMS:
        return f"{kind} of {size}"
    values = file.get(key)
    return values if isinstance(values, list) else values.tolist()


def _of_graph(path: Path) -> dict[str, Any]:
    """The graph, or why there is none: a file that cannot run can still be looked at."""
    try:
        files = open_model(path)
    except _core.Error as error:
        if path.is_dir():
            raise
        return {"graph": None, "graph_error": str(error)}
    weights = [value for value in files.graph.values.values() if value["weight_name"]]
    facts: dict[str, Any] = {
        "architecture": files.architecture,
        "parameters": sum(math.prod(value["shape"]) for value in weights),
        "nodes": len(files.graph.nodes),
        "graph": files.graph.to_string(),
        "pack_cache": _of_pack_cache(files),
    }
    if files.gguf is None:
        facts["format"] = "Hugging Face folder"
        facts["tensors"] = [
            {"name": w["weight_name"], "type": w["dtype"], "shape": list(w["shape"])}
            for w in weights
        ]
    return facts


def _of_pack_cache(files: ModelFiles) -> dict[str, Any]:
    """What a load with --pack-cache would find."""
    found = _core.find_pack_cache(files.graph, files.weights, pack_cache_dir(), _core.ThreadPool())
    size = Path(found.path).stat().st_size if found.state == "hit" else 0
    return {"state": found.state, "path": found.path, "reason": found.reason, "bytes": size}


def _print(facts: dict[str, Any]) -> None:
    print(f"{facts['path']}: {facts['format']}")
    for key, value in facts.get("metadata", {}).items():
        text = " ".join(str(value).split())
        print(f"  {key} = {text[:_SHOWN_CHARACTERS]}{'...' * (len(text) > _SHOWN_CHARACTERS)}")
    totals: dict[str, list[int]] = {}
    for tensor in facts["tensors"]:
        shape = "x".join(map(str, tensor["shape"]))
        size = tensor.get("bytes", "")
        print(f"  {tensor['name']:<36}{tensor['type']:<8}{shape:<16}{size:>12}")
        total = totals.setdefault(tensor["type"], [0, 0])
        total[0] += 1
        total[1] += tensor.get("bytes", 0)
    for kind, (count, size) in sorted(totals.items()):
        print(f"{kind}: {count} tensors" + (f", {size / 1e6:.1f} MB" if size else ""))
    if facts["graph"] is None:
        print(f"graph: none: {facts['graph_error']}")
    else:
        millions = facts["parameters"] / 1e6
        print(
            f"graph: {facts['architecture']}, {facts['nodes']} nodes, {millions:.1f} M parameters"
        )
        pack = facts["pack_cache"]
        if pack["state"] == "hit":
            print(f"pack cache: {pack['path']}, {pack['bytes'] / 1e6:.1f} MB")
        else:
            print(f"pack cache: {pack['state']}: {pack['reason']}")

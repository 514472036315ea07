"""Parts of the machine: of models that work at the same time, a target and what drafts for it on a
device of its own, and of one model whose layers are on two devices, "cuda+cpu"."""

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from effinfer import _core
from effinfer.speculation import Speculation
from effinfer.techniques.draft_model import DraftModel


def place_apart(
    device: str, speculation: Speculation | None, draft_model: Any, draft_device: str | None
) -> tuple[str, Speculation | None, Any]:
    """The same with devices that have no core in common: a target or a draft on "cpu" gets what the
    others leave. `draft_device` is that of `draft_model`. Throws InvalidArgumentError."""
    if draft_device is not None:
        _core.parse_placement(draft_device, "[LLM] draft_device")
        if isinstance(draft_model, str | os.PathLike):
            draft_model = DraftModel(draft_model)
        if not isinstance(draft_model, DraftModel):
            raise _core.InvalidArgumentError(
                f"[LLM] draft_device: expected a draft_model with it, got {draft_model!r}"
            )
        draft_model = replace(draft_model, device=draft_device)
    given = [] if speculation is None else speculation.proposers
    parts: list[Any] = list(given) if isinstance(given, Iterable) else []
    parts.append(draft_model)
    apart = [p for p in parts if isinstance(p, DraftModel) and p.device is not None]
    own = device.split("+")
    gpus = [name for name in _names(own) if name != "cpu"]
    if len(own) > 2 or len(set(gpus)) < len(gpus):
        raise _core.InvalidArgumentError(
            f'[LLM] device: expected one device, or two such as "cpu+cuda", got "{device}"'
        )
    if len(own) == 1 and not apart:
        return device, speculation, draft_model
    names = _core.place_apart([*own, *(str(p.device) for p in apart)])
    device, names = "+".join(names[: len(own)]), names[len(own) :]
    if not apart:
        return device, speculation, draft_model
    placed = {id(p): replace(p, device=name) for p, name in zip(apart, names, strict=True)}
    parts = [placed.get(id(p), p) for p in parts]
    draft_model = parts.pop()
    if speculation is not None:
        speculation = replace(speculation, proposers=parts)
    return device, speculation, draft_model


def _names(parts: list[str]) -> list[str]:
    return [_core.parse_placement(part, "[LLM] device")[0] for part in parts]


def place(
    device: str, threads: int | None, gpu_layers: int | None, graph: _core.Graph
) -> dict[str, Any]:
    """What an engine is told of its devices: `pool`, `device`, and for two of them `front`, that of
    the first layers. A pool has a thread for each of the cores that are named; with a GPU beside
    the CPU there is one pool. Throws InvalidArgumentError."""
    names, cores = zip(
        *(_core.parse_placement(part, "[LLM] device") for part in device.split("+")), strict=True
    )
    count = _front_layers(names, device, gpu_layers, graph)
    pools = [
        _core.ThreadPool.pinned(each, threads or 0) if each else _core.ThreadPool(threads or 0)
        for name, each in zip(names, cores, strict=True)
        if name == "cpu" or len(names) == 1
    ]
    front = None
    if len(names) == 2:
        front = _core.FrontLayers(names[0], count=count, pool=pools[0] if pools else None)
    return {
        "pool": pools[-1] if pools else _core.ThreadPool(threads or 0),
        "device": names[-1],
        "front": front,
    }


def _front_layers(
    names: tuple[str, ...], device: str, gpu_layers: int | None, graph: _core.Graph
) -> int | None:
    if gpu_layers is None:
        return None
    if len(names) != 2 or (names[0] == "cpu") == (names[1] == "cpu"):
        raise _core.InvalidArgumentError(
            '[LLM] gpu_layers: expected it with device="cpu+cuda" or "cuda+cpu", got '
            f'device="{device}"'
        )
    layers = len(_core.layers_of(graph))
    if not 0 <= gpu_layers <= layers:
        raise _core.InvalidArgumentError(
            f"[LLM] gpu_layers: expected 0..{layers}, as the model has them, got {gpu_layers}"
        )
    return gpu_layers if names[0] != "cpu" else layers - gpu_layers

"""The sampling that a model's makers recommend: in a folder generation_config.json, in a GGUF file
the keys general.sampling.*, for a model of the catalog its entry."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from effinfer import _core, hub
from effinfer.files.metadata import Metadata, read_json
from effinfer.hub.catalog import CATALOG
from effinfer.sampling import SamplingParams

_OF_FOLDERS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
_OF_GGUF = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def recommended_params(path: Path, gguf: Metadata | None) -> SamplingParams:
    """What the files of a model say, and SamplingParams' defaults for what they leave open. Throws
    FormatError for a value that no sampling can have."""
    found = _of_folder(path) if gguf is None else _of_gguf(path, gguf)
    try:
        params = SamplingParams(**{name: _number(name, found[name]) for name in found})
        params.to_core()
    except _core.InvalidArgumentError as error:
        raise _core.FormatError(f"[load] {path}: recommended sampling: {error}") from None
    return params


def recommended_keys(path: Path, gguf: Metadata | None) -> dict[str, Any]:
    """The keys general.sampling.* that a GGUF file made of this model gets. Throws FormatError as
    recommended_params()."""
    found = _of_folder(path) if gguf is None else _of_gguf(path, gguf)
    params = recommended_params(path, gguf)
    return {
        f"general.sampling.{key}": getattr(params, name)
        for key, name in _OF_GGUF.items()
        if name in found
    }


def _of_folder(path: Path) -> dict[str, Any]:
    config = read_json(path / "generation_config.json")
    found = {name: config[name] for name in _OF_FOLDERS if config.get(name) is not None}
    if config.get("do_sample") is False:
        found["temperature"] = 0.0
    return found


def _of_gguf(path: Path, gguf: Metadata) -> dict[str, Any]:
    values = {name: gguf.get(f"general.sampling.{key}") for key, name in _OF_GGUF.items()}
    found = {name: value for name, value in values.items() if value is not None}
    return found or dict(_of_catalog(path))


def _of_catalog(path: Path) -> Mapping[str, float]:
    for entry in CATALOG.values():
        if entry.file_name == path.name and path.resolve() == hub.local_path(entry).resolve():
            return entry.sampling
    return {}


def _number(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _core.InvalidArgumentError(f"{name}: expected a number, got {value!r}")
    return int(value) if name == "top_k" and float(value).is_integer() else value

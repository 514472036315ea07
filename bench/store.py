"""The results of one machine: one JSON file, in which a run replaces only what it measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def path_of(machine: dict[str, Any], folder: Path = RESULTS) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", f"{machine['cpu']} {machine['threads']} threads".lower())
    return folder / f"{name.strip('-')}.json"


def load(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"models": [], "sections": {}}
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def by_coverage(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The results of all machines, those with the most sections first; gpu.py's are its own."""
    paths = [path for path in sorted(folder.glob("*.json")) if not path.name.startswith("gpu-")]
    results = [load(path) for path in paths]
    return sorted(results, key=lambda result: len(result["sections"]), reverse=True)


def put_model(result: dict[str, Any], measured: dict[str, Any]) -> None:
    """Adds what was measured on a file to what is known of it."""
    for known in result["models"]:
        if known["file"] == measured["file"]:
            known.update(measured)
            return
    result["models"].append(measured)


def save(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, default=str) + "\n")

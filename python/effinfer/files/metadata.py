"""Reading what describes a model: GGUF metadata and JSON files."""

import json
from pathlib import Path
from typing import Any, Protocol

from effinfer import _core


class Metadata(Protocol):
    """What readers of GGUF metadata need: a `_core.GgufFile`, or a dict with the same keys."""

    def get(self, key: str, default: Any = None, /) -> Any: ...


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} when there is no such file. Throws FormatError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise _core.FileError(f"[load] {path}: {error.strerror}") from None
    except ValueError as error:
        raise _core.FormatError(f"[load] {path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise _core.FormatError(f"[load] {path}: expected a JSON object")
    return value


def token_text(value: Any) -> str | None:
    """A special token of tokenizer_config.json: a string or {"content": ...}."""
    return value.get("content") if isinstance(value, dict) else value

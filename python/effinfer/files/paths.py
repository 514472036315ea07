"""Where effinfer keeps files of the user."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """$EFFINFER_CACHE, else effinfer/ in $XDG_CACHE_HOME, else in ~/.cache. It may not exist."""
    explicit = os.environ.get("EFFINFER_CACHE")
    if explicit:
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "effinfer"


def tuning_cache_dir() -> Path:
    """Where what was measured of the machine is kept."""
    return cache_dir() / "tuning"


def pack_cache_dir() -> Path:
    """Where packed weights are kept when nobody names another folder."""
    return cache_dir() / "packed"

"""What the log says of a load."""

import logging
from pathlib import Path

from effinfer import _core

_log = logging.getLogger(__name__)


def log_load(engine: _core.Engine, path: Path, seconds: float, threads: int | None) -> None:
    """threads: what the caller asked for."""
    if threads is not None and engine.threads < threads:
        _log.warning("threads: %d asked for, %d run: no more CPUs here", threads, engine.threads)
    _log.info(
        "loaded %s in %.2f s: %d threads, %s, context %d",
        path,
        seconds,
        engine.threads,
        _core.current_isa(),
        engine.max_seq_len,
    )
    pack = engine.pack_cache
    if pack.state != "off":
        _log.info("pack cache: %s: %s", pack.state, pack.reason or pack.path)

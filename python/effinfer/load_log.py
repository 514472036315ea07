"""What the log says of a load."""

import functools
import logging
from pathlib import Path

from effinfer import _core

_log = logging.getLogger(__name__)
_of_core = logging.getLogger("effinfer.core")

# What went wrong in the core is also an exception or a warning here: it is said once.
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.INFO}


@functools.cache
def forward_core_log() -> None:
    """What the core tells goes to the logger effinfer.core, from now on."""
    _core.set_log_callback(lambda level, text: _of_core.log(_LEVELS[level], "%s", text), "debug")


def log_load(engine: _core.Engine, path: Path, seconds: float, threads: int | None) -> None:
    """threads: what the caller asked for."""
    if threads is not None and engine.threads < threads:
        _log.warning("threads: %d asked for, %d run: no more CPUs here", threads, engine.threads)
    if engine.placement:
        _log.info("%s", engine.placement)
    _log.info(
        "loaded %s in %.2f s: %d threads, context %d",
        path,
        seconds,
        engine.threads,
        engine.max_seq_len,
    )

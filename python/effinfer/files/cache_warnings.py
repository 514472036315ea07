"""What a load says of the user's cache when it cannot be written."""

import warnings

from effinfer import _core


class PackCacheWarning(UserWarning):
    """Packed weights could not be kept on disk; the model runs all the same."""


class TuningCacheWarning(UserWarning):
    """What was measured of the machine could not be kept: the next load measures again."""


def warn_of_caches(engine: _core.Engine) -> None:
    """Warns who makes the LLM that calls this."""
    if engine.pack_cache.state == "failed":
        warnings.warn(engine.pack_cache.reason, PackCacheWarning, stacklevel=3)
    if engine.tuning_trouble:
        warnings.warn(engine.tuning_trouble, TuningCacheWarning, stacklevel=3)

"""The model files of tests: in the user's cache, pulled on first use."""

import functools
from pathlib import Path

from effinfer import hub


@functools.cache
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1."""
    return hub.pull("smollm2-135m")


@functools.cache
def gemma3_path() -> Path:
    """Gemma 3 270M, Q4_K_M."""
    return hub.pull("gemma3-270m")

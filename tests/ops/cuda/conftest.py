"""Operators on a GPU: "cuda:0" of the machine, or the emulator's (tests/ops/test_on_gpu.py)."""

import pytest

import effinfer


def pytest_collection_modifyitems(items):
    if "cuda:0" in effinfer.info().devices:
        return
    skipped = pytest.mark.skip(reason="needs a GPU, or the emulator: tests/ops/test_on_gpu.py")
    for item in items:
        if "tests/ops/cuda" in item.path.as_posix():
            item.add_marker(skipped)

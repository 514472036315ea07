"""tests/ops/cuda in a process that preloads the library with the emulator for a GPU
(EFFINFER_EMULATED, which `make test` sets); where there is a GPU they run by themselves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EMULATED = os.environ.get("EFFINFER_EMULATED", "")
TESTS = Path(__file__).parent / "cuda"


@pytest.mark.skipif(not EMULATED, reason="needs EFFINFER_EMULATED: see `make test`")
def test_in_the_emulator():
    # Torch's other threads would only wait.
    environment = os.environ | {"LD_PRELOAD": EMULATED, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(TESTS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert "skipped" not in done.stdout.splitlines()[-1]

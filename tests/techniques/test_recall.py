"""The models in examples/tiny: attention of fewer keys finds pairs where it was trained to, and the
recipe that trained them runs."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from effinfer import LLM

FOLDER = Path(__file__).parents[2] / "examples" / "tiny"


@pytest.fixture(scope="module")
def recall() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recall", FOLDER / "recall.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", ["dense", "mlkv", "longgen"])
def test_trained_models_find_pairs(recall, kind):
    assert recall.accuracy(LLM(FOLDER / f"{kind}.gguf", **recall.KINDS[kind])) > 0.9


def test_shared_keys_must_be_trained(recall):
    llm = LLM(FOLDER / "dense.gguf", **recall.KINDS["mlkv"])
    assert recall.accuracy(llm) < 0.1


def test_layers_in_the_middle_find_what_windows_do_not_see(recall):
    for kind in ("dense", "longgen"):
        # A third of the pairs is in the window.
        assert recall.accuracy(LLM(FOLDER / f"{kind}.gguf", **recall.WINDOWS)) < 0.4


def test_models_are_small():
    assert sum(path.stat().st_size for path in FOLDER.glob("*.gguf")) < 1e6


def test_the_recipe_runs(recall, tmp_path):
    command = [sys.executable, FOLDER / "train.py", tmp_path, "--kinds", "mlkv", "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # It knows nothing yet.
    assert recall.accuracy(LLM(tmp_path / "mlkv.gguf", **recall.KINDS["mlkv"])) < 0.1

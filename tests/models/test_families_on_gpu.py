"""Every family of models on a GPU: in a process that preloads the library with the emulator for a
GPU (EFFINFER_EMULATED, which `make test` sets)."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import effinfer
from tests.reference import tiny

EMULATED = os.environ.get("EFFINFER_EMULATED", "")
TOKENS = tiny.TOKEN_IDS[:20]
FAMILIES = tiny.FAMILIES | tiny.TERNARY_FAMILIES
CODE = """
import json, sys
import effinfer

path, tokens = sys.argv[1], json.loads(sys.argv[2])
found = {"devices": effinfer.info().devices}
for precision in ("f32", "fast"):
    llm = effinfer.LLM(path, device="auto", precision=precision, max_seq_len=128)
    found[precision] = llm.logits(tokens).tolist()
    found["explain"] = llm.explain()
params = effinfer.SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.9, seed=3)
found["text"] = llm.generate("The th", params)[0].token_ids
found["pair"] = [o.token_ids for o in llm.generate(["The th", "other"], params)]
print(json.dumps(found))
"""

pytestmark = pytest.mark.skipif(not EMULATED, reason="needs EFFINFER_EMULATED: see `make test`")


def on_gpu(path: Path) -> dict[str, Any]:
    environment = os.environ | {"LD_PRELOAD": EMULATED}
    command = [sys.executable, "-c", CODE, str(path), json.dumps(TOKENS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_cpu(name: str, tmp_path: Path):
    path = tiny.write_gguf(FAMILIES[name], tmp_path / "model.gguf")
    found = on_gpu(path)
    assert found["devices"] == ["cpu", "cuda:0"]
    assert "device cuda:0" in found["explain"]
    assert "attention.cuda" in found["explain"]
    expected = np.asarray(effinfer.LLM(str(path), precision="f32").logits(TOKENS))
    assert distance(np.asarray(found["f32"]), expected) < 1e-5
    # Roundings to bfloat16 of some dozen tensors; of ternary models to int8 of whole rows.
    assert 0 < distance(np.asarray(found["fast"]), expected) < 0.05
    assert found["pair"][0] == found["text"]

"""Methods that keep keys by what they get of attention, on a GPU: the keys that the CPU keeps, and
texts that depend on their own request alone. In a process that preloads the library with the
emulator for a GPU (EFFINFER_EMULATED, which `make test` sets)."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from effinfer import LLM, SamplingParams
from effinfer.techniques import (
    H2O,
    Keyformer,
    KVCompose,
    RaaS,
    SnapKV,
    Technique,
    WindowKV,
)
from tests.techniques.contract_model import Request, long_model, texts
from tests.techniques.watching import watching

EMULATED = os.environ.get("EFFINFER_EMULATED", "")
SUMMED = {"budget": 50, "recent": 20, "stride": 10, "chunk_tokens": 64}
ASKED = {"budget": 60, "window": 9, "chunk_tokens": 64}
METHODS: dict[str, Technique] = {
    "h2o": H2O(**SUMMED),
    "h2o, decay": H2O(**SUMMED, decay=0.95),
    "h2o, maximum": H2O(**SUMMED, reduce="maximum"),
    "keyformer": Keyformer(**SUMMED, temperature=1.5, noise=0.8),
    "kv_compose": KVCompose(**ASKED),
    "raas": RaaS(budget=4, stride=4, alpha=0.02, chunk_tokens=64),
    "snapkv": SnapKV(**ASKED, pool=5),
    "window_kv": WindowKV(**ASKED, span=6, group=2),
}
# Layers keep other numbers of keys.
LAYERED = KVCompose(**ASKED, layer_budgets=True)
APART = ("h2o", "window_kv")
PLACES = [*((name, "cuda") for name in METHODS), *((name, "cpu+cuda") for name in APART)]
HEADS = 6  # two of each of three layers
CODE = """
import json, sys
import numpy as np
from tests.techniques.test_eviction_on_gpu import (
    LAYERED, METHODS, PLACES, keys_kept, own_texts
)

path, folder = sys.argv[1:]
for name, device in PLACES:
    np.save(f"{folder}/{name}.{device}.npy", keys_kept(path, name, device))
found = [own_texts(path, method) for method in (METHODS["snapkv"], LAYERED)]
found.append(own_texts(path, LAYERED, device="cpu+cuda", gpu_layers=1))
print(json.dumps(found))
"""

pytestmark = pytest.mark.skipif(not EMULATED, reason="needs EFFINFER_EMULATED: see `make test`")


def prompt_of(count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(count).integers(0, 200, count).tolist()
    return tokens


def load(path: Any, *techniques: Technique, **options: Any) -> LLM:
    return LLM(path, techniques=list(techniques), max_batch_tokens=128, **options)


def keys_kept(path: Any, name: str, device: str) -> np.ndarray:
    """Behind a few generated tokens the keys of each head, and beside them the numbers that they
    are chosen by: [head, slot, dim and one]."""
    seen: list[np.ndarray] = []

    def note(sequence: Any) -> None:
        keys = np.stack([sequence.keys(head) for head in range(HEADS)])
        seen.append(np.concatenate([keys, sequence.plane(METHODS[name].name)[:, :, None]], axis=2))

    options: dict[str, Any] = {"device": device, "precision": "f32", "kv_dtype": "f32"}
    if device == "cpu+cuda":
        options["gpu_layers"] = 1
    llm = load(path, METHODS[name], watching(note, when="every", tokens=11), **options)
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    assert llm.generate([prompt_of(90)], params)[0].error == ""
    (kept,) = seen
    return kept


def own_texts(path: Any, method: Technique, **places: Any) -> list[Any]:
    """Of some requests alone, together, with what is cached, when some lose their pages, and of
    the last two as answers to one."""
    sampled = SamplingParams(temperature=0.7, seed=1, max_tokens=9, ignore_eos=True)
    requests: list[Request] = [
        (prompt_of(62), replace(sampled, temperature=0.0)),
        (prompt_of(70), sampled),
        (prompt_of(70), replace(sampled, seed=2)),
    ]
    places = places or {"device": "cuda"}
    alone = load(path, method, **places, prefix_cache=False)
    found = [[texts(alone, [request])[0] for request in requests]]
    cached = load(path, method, **places)
    found += [texts(cached, requests) for _ in range(2)]
    few = load(path, method, **places, num_pages=3, max_seq_len=128)
    found.append(texts(few, requests))
    assert few.engine.stats()["preemptions"] > 0
    together = cached.generate([requests[1][0]], replace(sampled, n=2))[0]
    return [*found, [together.token_ids, together.others[0].token_ids]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return long_model(tmp_path_factory)


@pytest.fixture(scope="module")
def found(path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("kept")
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(path), str(folder)],
        env=os.environ | {"LD_PRELOAD": EMULATED},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


@pytest.mark.parametrize(("name", "device"), PLACES)
def test_keys_are_those_of_the_cpu(path: Path, found: Any, name: str, device: str):
    expected = keys_kept(path, name, "cpu")
    got = np.load(found[0] / f"{name}.{device}.npy")
    assert expected.shape[1] < 90 + 10  # some went
    # Other keys are further away from each other than what rounding makes of one.
    apart = np.abs(expected[:, :, None, :-1] - expected[:, None, :, :-1]).max(axis=3)
    assert (apart + np.eye(expected.shape[1])).min() > 1e-3
    np.testing.assert_allclose(got[:, :, :-1], expected[:, :, :-1], rtol=0, atol=1e-4)
    np.testing.assert_allclose(got[:, :, -1], expected[:, :, -1], rtol=1e-3, atol=1e-6)


def test_a_text_depends_on_its_request_alone(found: Any):
    for alone, together, cached, preempted, answers in found[1]:
        assert together == cached == preempted == alone
        assert answers == alone[1:]
        assert answers[0] != answers[1]

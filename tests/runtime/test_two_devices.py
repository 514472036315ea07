"""A model that drafts on cores of its own while the target verifies: texts, log-probabilities and
the bytes of the cache are plain decoding's, whatever the timing."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import effinfer
from effinfer import _core
from effinfer.checkpoints.model_files import ModelFiles, open_model
from effinfer.speculation import Draft, Proposer, Speculation
from effinfer.techniques import DraftModel, EarlyExit
from effinfer.testing import make_model, make_twin
from tests.cli.test_cli import effinfer as command
from tests.reference import tiny
from tests.runtime.test_draft_model import (
    LAYERS,
    accepted_share,
    metrics,
    sampled_asks,
    sharpened,
    speculation,
    warned,
)
from tests.runtime.test_drafts import SHAPES, make_engine, ragged, run, same

pytestmark = pytest.mark.alone

CORES = sorted(os.sched_getaffinity(0))
EMULATED = os.environ.get("EFFINFER_EMULATED", "")
TARGET, DRAFT = f"cpu:{CORES[0]}", f"cpu:{CORES[-1]}"
needs_two = pytest.mark.skipif(len(CORES) < 2, reason="the process may use one core")
# On a busy machine the draft would else get to nothing before the texts end.
PAUSE_S = 0.01


class Pause(Proposer):
    """Guesses nothing, for a while."""

    name = "pause"

    def propose(self, views: list[dict[str, Any]]) -> list[Draft | None]:
        time.sleep(PAUSE_S)
        return [None] * len(views)


def proposer(model: ModelFiles, **options: Any) -> _core.Proposer:
    options = {"length": 5, "adaptive": False, "device": DRAFT, **options}
    return _core.draft_model_proposer(model.graph, model.weights, **options)


def engine_on_its_core(model: ModelFiles, drafts: _core.Proposer, **options: Any) -> _core.Engine:
    pool = _core.ThreadPool.pinned([CORES[0]])
    return _core.Engine(
        model.graph, model.weights, pool, speculation=speculation(drafts), **options
    )


@needs_two
@pytest.mark.parametrize(
    "options",
    [{}, {"precision": "f32", "max_batch_tokens": 17}, {"deterministic": True, "kv_dtype": "i8"}],
    ids=str,
)
@pytest.mark.parametrize(("kind", "width"), [("wrong", 1), ("wrong", 3), ("right", 2), ("own", 1)])
def test_drafts_beside_the_target_change_nothing(models, kind, width, options):
    target = sharpened(models["llama"]) if kind == "right" else models["llama"]
    draft = {"wrong": models["gemma3"], "right": target, "own": target}[kind]
    if kind == "own":  # layers of the target, over the weights that are packed already
        graph = LAYERS["llama"].apply(target.graph)
        drafts = _core.draft_model_proposer(
            graph, target.weights, of_target=True, adaptive=False, device=DRAFT
        )
    else:
        drafts = proposer(draft, width=width)
    asks = ragged(6, tiny.VOCAB_SIZE, most=60)
    options = {"prefix_cache": False, **options}
    plain = run(make_engine(target, **options), asks, SHAPES["llama"])
    engine = engine_on_its_core(target, drafts, **options)
    drafted = run(engine, asks, SHAPES["llama"], pause_s=PAUSE_S)
    same(drafted, plain)
    for got, expected in zip(drafted, plain, strict=True):
        length = min(got.kv.shape[3], expected.kv.shape[3])
        np.testing.assert_array_equal(got.kv[:, :, :, :length], expected.kv[:, :, :, :length])
    (found,) = engine.stats()["drafters"]
    assert (found["name"], found["device"]) == ("draft_model", DRAFT)
    assert found["levels"] > 0 and found["asked"] >= found["late"]


@needs_two
def test_draws_are_foreseen_beside_the_target_too(models):
    engine = engine_on_its_core(
        models["llama"], proposer(models["llama"]), precision="f32", prefix_cache=False
    )
    run(engine, sampled_asks(), pause_s=PAUSE_S)
    assert accepted_share(engine) > 0.93  # as in turns


@needs_two
def test_nothing_is_drafted_before_the_first_token(models):
    engine = engine_on_its_core(models["llama"], proposer(models["gemma3"]), max_batch_tokens=16)
    params = _core.SamplingParams(max_tokens=30, ignore_eos=True)
    engine.add(list(range(100)), params)
    while not any(output.token_ids for output in engine.step()):
        assert engine.stats()["drafters"][0]["levels"] == 0
    assert engine.stats()["drafters"][0]["levels"] == 0


@needs_two
@pytest.mark.parametrize(
    ("what", "part"),
    [("context", "context of 70 tokens"), ("pages", "no page is left"), ("nan", "NaN")],
)
def test_what_a_draft_model_cannot_do_is_told_once(models, what, part):
    model = models["llama"]
    graph, weights, options = model.graph, model.weights, {}
    if what == "context":
        context = graph.metadata["context_length"]
        text = graph.to_string().replace(f"context_length = {context}", "context_length = 70")
        graph = _core.Graph.parse(text)
    elif what == "pages":
        options = {"num_pages": 2}
    else:
        name = "blk.1.ffn_norm.weight"
        shape = model.weights.shape(name)
        weights = _core.LayeredWeights(model.weights)
        weights.add(name, np.full(shape, np.nan, np.float32), "f32", list(shape))
    drafts = _core.draft_model_proposer(graph, weights, adaptive=False, device=DRAFT, **options)
    asks = ragged(6, tiny.VOCAB_SIZE)
    plain = run(make_engine(model, prefix_cache=False), asks)
    engine = engine_on_its_core(model, drafts, prefix_cache=False)
    answers, messages = warned(engine, asks, pause_s=PAUSE_S)
    same(answers, plain)
    told = [each for each in messages.values() if each]
    assert told and all(len(each) == 1 and part in each[0] for each in told)
    assert [m["refused_drafts"] for m in metrics(engine, 6)] == [len(m) for m in messages.values()]


@needs_two
def test_cancelled_and_many_requests_leave_no_page(models):
    drafts = proposer(models["llama"], num_pages=40, width=2)
    engine = engine_on_its_core(models["llama"], drafts, max_sequences=3)
    asks = ragged(8, tiny.VOCAB_SIZE)
    plain = run(make_engine(models["llama"], prefix_cache=False), asks)
    drafted = run(engine, asks, cancel=(0, 4))
    same([drafted[i] for i in (1, 2, 3, 5, 6, 7)], [plain[i] for i in (1, 2, 3, 5, 6, 7)])
    again, messages = warned(engine, asks)
    assert not any(messages.values())


@needs_two
def test_llm_drafts_beside_itself(tmp_path):
    path = make_model("llama-tiny", tmp_path / "target.gguf")
    twin = make_twin(path, tmp_path / "twin.gguf", depth=8)
    prompt = list(range(5, 40))
    params = effinfer.SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with effinfer.LLM(twin) as llm:
        expected = llm.generate([prompt], params)[0].token_ids
        assert llm.engine.cores == CORES and llm.engine.stats()["drafters"] == []
    fixed = Speculation([Pause()], controller=8)
    drafts = [path, DraftModel(path, width=2, adaptive=False), DraftModel(EarlyExit(2))]
    for draft in drafts:
        options = {"draft_model": draft, "draft_device": DRAFT, "speculation": fixed}
        with effinfer.LLM(twin, **options) as llm:
            # "cpu" is what the draft leaves.
            assert llm.engine.cores == [core for core in CORES if core != CORES[-1]]
            output = llm.generate([prompt], params)[0]
            assert output.token_ids == expected
            assert output.metrics.speculation.accepted > 0
            assert f" on {DRAFT}" in llm.explain()
    with effinfer.LLM(twin, device=TARGET, draft_model=path, draft_device="cpu") as llm:
        assert llm.engine.cores == [CORES[0]]
        assert llm.generate([prompt], params)[0].token_ids == expected
    part = DraftModel(path, device=DRAFT)
    with effinfer.LLM(twin, speculation=Speculation([part])) as llm:
        assert llm.generate([prompt], params)[0].token_ids == expected


def test_devices_that_cannot_be(tmp_path):
    path = make_model("llama-tiny", tmp_path / "model.gguf")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"device": "cpu:9999"}, r"\[LLM\] device: expected cores of .*; the machine has"),
        ({"device": "cpu:a"}, "expected cores as in"),
        ({"draft_model": path, "draft_device": "cpu:9999"}, r"draft_device: expected cores of"),
        ({"draft_model": path, "draft_device": "gpu"}, r"\[LLM\] draft_device: expected"),
        ({"draft_model": path, "draft_device": "cpu"}, 'got "cpu" and "cpu"'),
        ({"draft_model": path, "device": TARGET, "draft_device": TARGET}, "none in common"),
        ({"draft_device": DRAFT}, "draft_device: expected a draft_model with it"),
    ]
    if len(_core.available_devices()) == 1:
        cases.append(({"draft_model": path, "draft_device": "cuda:0"}, "CUDA"))
    for options, part in cases:
        with pytest.raises(effinfer.InvalidArgumentError, match=part):
            effinfer.LLM(path, **options)
    # An engine whose threads are anywhere shares the draft's cores.
    model = open_model(path)
    drafts = _core.draft_model_proposer(model.graph, model.weights, device=DRAFT)
    with pytest.raises(effinfer.InvalidArgumentError, match="none in common"):
        make_engine(model, speculation=speculation(drafts))


@needs_two
def test_cores_that_are_not_the_process_s():
    code = f"import effinfer; effinfer.LLM('none.gguf', device='{DRAFT}')"
    done = subprocess.run(
        ["taskset", "-c", str(CORES[0]), sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0 and "is not this process's" in done.stderr


@needs_two
def test_a_trace_shows_both(tmp_path):
    path = make_model("llama-tiny", tmp_path / "target.gguf")
    twin = make_twin(path, tmp_path / "twin.gguf", depth=8)
    trace = tmp_path / "trace.json"
    options = ("--pp", 40, "--tg", 4, "--repeat", 1, "--trace", trace, "--json")
    models = ("-m", twin, "--draft-model", path, "--draft-device", DRAFT)
    result = command("bench", *models, *options)
    assert result.returncode == 0, result.stderr
    name = f"draft_model on {DRAFT}"
    share = json.loads(result.stdout)["drafts_overlapped"][name]
    assert 0 < share <= 1
    events = json.loads(trace.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert set(names.values()) == {"target", name}
    steps: dict[str, list[tuple[float, float]]] = {each: [] for each in names.values()}
    for event in events:
        if event.get("cat") == "step":
            steps[names[event["pid"]]].append((event["ts"], event["ts"] + event["dur"]))
    assert all(steps.values())
    both = sum(
        max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in steps[name] for b in steps["target"]
    )
    assert share == pytest.approx(both / sum(end - begin for begin, end in steps[name]), rel=1e-3)


ON_GPU = """
import json, sys, time, warnings
import effinfer
from effinfer.speculation import Proposer, Speculation

class Slow(Proposer):  # gives an emulated device time to draft
    name = "slow"

    def propose(self, views):
        time.sleep(0.2)
        return [None] * len(views)

twin, path, device, draft_device = sys.argv[1:]
warnings.simplefilter("error")
params = effinfer.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
texts = []
for drafts in ({}, {"draft_model": path, "draft_device": draft_device}):
    if drafts:
        drafts["speculation"] = Speculation([Slow()])
    llm = effinfer.LLM(twin, device=device, max_seq_len=128, **drafts)
    texts.append(llm.generate([[5, 6, 7, 8]], params)[0].token_ids)
print(json.dumps([texts, llm.engine.stats()["drafters"], llm.explain()]))
"""


@pytest.mark.skipif(not EMULATED, reason="needs EFFINFER_EMULATED: see `make test`")
@pytest.mark.parametrize(("device", "draft_device"), [("cuda", "cpu"), ("cpu", "cuda:0")])
def test_a_gpu_and_the_cpu_side_by_side(tmp_path: Path, device, draft_device):
    path = make_model("llama-tiny", tmp_path / "model.gguf")
    twin = make_twin(path, tmp_path / "twin.gguf", depth=2)
    done = subprocess.run(
        [sys.executable, "-c", ON_GPU, str(twin), str(path), device, draft_device],
        env=os.environ | {"LD_PRELOAD": EMULATED},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    texts, drafters, explained = json.loads(done.stdout)
    assert texts[0] == texts[1]
    assert drafters[0]["device"] == draft_device and drafters[0]["levels"] > 0
    assert f"draft_model on {draft_device}" in explained

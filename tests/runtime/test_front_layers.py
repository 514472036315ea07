"""Models whose first layers are on another device than the rest: texts, log-probabilities and the
bytes of the cache are those of one device, whoever drafts, and what cannot be is refused."""

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import effinfer
from effinfer import _core
from effinfer.checkpoints.model_files import ModelFiles
from effinfer.speculation import Speculation
from effinfer.techniques import Eagle, Medusa, SkipLayers
from tests.cli.test_cli import effinfer as command
from tests.head_files import random_weights, write_heads
from tests.model_files import smollm2_path
from tests.reference import tiny
from tests.runtime.test_draft_model import metrics, speculation
from tests.runtime.test_drafts import SHAPES, Answer, Guesser, make_engine, ragged, run, same

CORES = sorted(os.sched_getaffinity(0))
EMULATED = os.environ.get("EFFINFER_EMULATED", "")
MODES: list[dict[str, Any]] = [
    {},
    {"precision": "f32", "max_batch_tokens": 17},
    {"deterministic": True, "kv_dtype": "i8"},
]


def split(model: ModelFiles, count: int | None, **options: Any) -> _core.Engine:
    """Two pools of the CPU are two devices."""
    front = _core.FrontLayers("cpu", count=count, pool=_core.ThreadPool(1))
    return make_engine(model, front=front, **options)


def same_bytes(left: list[Answer], right: list[Answer]) -> None:
    same(left, right)
    for got, expected in zip(left, right, strict=True):
        length = min(got.kv.shape[3], expected.kv.shape[3])
        assert length > 20
        np.testing.assert_array_equal(got.kv[:, :, :, :length], expected.kv[:, :, :, :length])


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize(
    ("name", "count"),
    [("llama", 1), ("llama", 2), ("gemma3", 1), ("gemma3", 5), ("gemma3", 6), ("mistral", 1)],
)
def test_everything_is_as_on_one_device(models, name, count, options):
    model, asks = models[name], ragged(6, tiny.VOCAB_SIZE, most=60)
    options = {"prefix_cache": False, **options}
    one, two = make_engine(model, **options), split(model, count, **options)
    layers = SHAPES[name][0]
    assert f" on cpu, layer{'s' if count < layers - 1 else ''} {count}" in two.placement
    same_bytes(run(two, asks, SHAPES[name]), run(one, asks, SHAPES[name]))
    tokens = np.random.default_rng(3).integers(0, tiny.VOCAB_SIZE, 70).tolist()
    for phase in ("prefill", "decode"):
        np.testing.assert_array_equal(two.logits(tokens, phase), one.logits(tokens, phase))


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize(("name", "count"), [("llama", 2), ("gemma3", 3)])
def test_drafts_change_nothing(models, name, count, options):
    model, asks = models[name], ragged(6, tiny.VOCAB_SIZE, most=60)
    options = {"prefix_cache": False, **options}
    plain = run(make_engine(model, **options), asks, SHAPES[name])
    guesser = Guesser(asks, plain, tiny.VOCAB_SIZE, seed=1)
    drafts = Speculation([guesser], controller=20).build()
    same_bytes(run(split(model, count, speculation=drafts, **options), asks, SHAPES[name]), plain)
    assert guesser.accepted > 50


def test_preempted_cancelled_and_repeated_requests(models):
    model, asks = models["llama"], ragged(8, tiny.VOCAB_SIZE)
    plain = run(make_engine(model, precision="f32"), asks)
    engine = split(model, 1, precision="f32", num_pages=7)
    same(run(engine, asks), plain)
    assert engine.stats()["preemptions"] > 0
    again = run(engine, asks, cancel=(0, 4))
    kept = (1, 2, 3, 5, 6, 7)
    same([again[i] for i in kept], [plain[i] for i in kept])
    engine = split(model, 1, precision="f32")
    for _ in range(2):
        same(run(engine, asks), plain)
    cached = [engine.metrics(i)["cached_tokens"] for i in range(9, 17)]
    assert [tokens >= 64 for tokens in cached] == [len(prompt) > 64 for prompt, _ in asks]


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_heads_and_layers_of_a_model_on_two_devices_draft(models, tmp_path, kind):
    model, asks = models["llama"], ragged(5, tiny.VOCAB_SIZE, most=60)
    plain = run(make_engine(model), asks)
    tokens = list(range(0, tiny.VOCAB_SIZE, 3))
    weights = random_weights(kind, 64)
    path = write_heads(tmp_path / "heads.gguf", kind, weights, 64, tiny.VOCAB_SIZE, tokens)
    heads = {"medusa": Medusa, "eagle": Eagle}[kind](path, adaptive=False).for_target(model)
    engine = split(model, 1, speculation=Speculation([heads], controller=8).build())
    same(run(engine, asks), plain)
    assert sum(m["drafted"] for m in metrics(engine, 5)) > 60
    skipping = _core.draft_model_proposer(
        SkipLayers([1]).apply(model.graph), model.weights, of_target=True, adaptive=False
    )
    engine = split(model, 2, speculation=speculation(skipping))
    same(run(engine, asks), plain)
    assert sum(m["drafted"] for m in metrics(engine, 5)) > 60


def test_a_cut_graph_has_every_node_once_and_hands_on_the_residual_stream(models):
    for name, (layers, _) in SHAPES.items():
        graph = models[name].graph
        assert _core.layers_of(graph) == list(range(layers))
        for count in range(1, layers):
            front, back = _core.cut_graph(graph, count)
            assert _core.layers_of(front) == list(range(count))
            assert _core.layers_of(back) == list(range(count, layers))
            (crossing,) = front.outputs
            assert f"input %{crossing} : f32[T, 64]" in str(back)
            assert str(back).count("input ") == 3 and back.outputs == graph.outputs
            made = [node["outputs"][0] for half in (front, back) for node in half.nodes]
            twice = {value for value in made if made.count(value) > 1}
            assert set(made) == {node["outputs"][0] for node in graph.nodes}
            ops = {node["op"] for node in graph.nodes if node["outputs"][0] in twice}
            assert ops == {"rope_table"}


GRAPH = """graph two {{
  meta context_length = 128
  meta vocab_size = 11
  meta num_layers = 2
  meta num_kv_heads = 1
  meta head_dim = 16
  input %token_ids : i32[T]
  input %logit_rows : i32[R]
  input %more : f32[T, 16]
  weight %table = "table" : f32[11, 16]
  weight %q = "q" : f32[16, 16]
  %x : f32[T, 16] = embedding(%token_ids, %table)
  %s : f32[T, 16] = add(%x, %more)
  %kv0 : kv[0, 1, 16] = kv_append(%s, %s) {{layer = 0, heads = 1, head_dim = 16}}
  %a0 : f32[T, 16] = attention(%s, %kv0) {{{attention}layer = 0}}
  %early : f32[T, 16] = add(%a0, %s)
  %rows : f32[R, 16] = select_rows(%a0, %logit_rows)
  %q1 : f32[T, 16] = linear(%early, %q)
  %kv1 : kv[1, 1, 16] = kv_append(%q1, %early) {{layer = 1, heads = 1, head_dim = 16}}
  %a1 : f32[T, 16] = attention(%q1, {read}) {{{attention}layer = {layer}}}
  %y : f32[T, 16] = add(%a1, %more)
  %last : f32[R, 16] = select_rows(%y, %logit_rows)
  %logits : f32[R, 11] = linear(%last, %table)
  return %logits, %early, %rows
}}
"""
ATTENTION = "heads = 1, kv_heads = 1, head_dim = 16, sm_scale = 0.25, "


def test_inputs_and_outputs_of_either_half():
    rng = np.random.default_rng(5)
    weights = _core.MemoryWeights()
    for name, rows in (("table", 11), ("q", 16)):
        values = rng.standard_normal((rows, 16)).astype(np.float32)
        weights.add(name, values, "f32", [rows, 16])
    graph = _core.Graph.parse(GRAPH.format(attention=ATTENTION, read="%kv1", layer=1))
    pool = _core.ThreadPool(1)

    def step(front: _core.FrontLayers | None, **floats: np.ndarray) -> dict[str, np.ndarray]:
        options = _core.CompileOptions(precision="f32", max_tokens=40, max_rows=8, front=front)
        executable = _core.compile(graph, weights, pool, options)
        found = {}
        found["logits"] = executable.run(
            token_ids=[i % 11 for i in range(33)],
            positions=list(range(33)),
            qo_indptr=[0, 33],
            kv_indptr=[0, 1],
            kv_indices=[0],
            kv_len=[33],
            logit_rows=[4, 32],
            cache=executable.make_cache(1),
            float_inputs=floats,
        )
        assert executable.output_names == ["early", "rows"]
        return found | {name: executable.output(name).copy() for name in executable.output_names}

    front = _core.FrontLayers("cpu", count=1)
    more = rng.standard_normal((33, 16)).astype(np.float32)
    one, two = step(None, more=more), step(front, more=more)
    assert [values.shape for values in two.values()] == [(2, 11), (33, 16), (2, 16)]
    for name, values in one.items():
        np.testing.assert_array_equal(two[name], values)
    with pytest.raises(effinfer.InvalidArgumentError, match='"more" once, got it 0 times'):
        step(front)
    with pytest.raises(effinfer.InvalidArgumentError, match='inputs of the graph, got "other"'):
        step(front, more=more, other=more)


def test_graphs_that_cannot_be_cut_are_refused(models):
    graph = models["llama"].graph
    for count in (0, 3, -1):
        with pytest.raises(effinfer.InvalidArgumentError, match=rf"expected 1\.\.2, got {count}"):
            _core.cut_graph(graph, count)
    with pytest.raises(
        effinfer.InvalidArgumentError, match=r"front: expected 0\.\.3 layers, got 4"
    ):
        split(models["llama"], 4)
    shared = _core.Graph.parse(GRAPH.format(attention=ATTENTION, read="%kv0", layer=0))
    with pytest.raises(effinfer.InvalidArgumentError, match="no line divides two behind 1 layers"):
        _core.cut_graph(shared, 1)
    text = """graph flat {
      input %token_ids : i32[T]
      input %logit_rows : i32[R]
      weight %table = "token_embd.weight" : f32[11, 16]
      %x : f32[T, 16] = embedding(%token_ids, %table)
      %last : f32[R, 16] = select_rows(%x, %logit_rows)
      %logits : f32[R, 11] = linear(%last, %table)
      return %logits
    }"""
    flat = _core.Graph.parse(text)
    with pytest.raises(effinfer.InvalidArgumentError, match="at least 2 layers, got 0 in flat"):
        _core.cut_graph(flat, 1)
    options = _core.CompileOptions(front=_core.FrontLayers("cpu"))
    with pytest.raises(effinfer.InvalidArgumentError, match="at least 2 layers, got 0 in flat"):
        _core.compile(flat, _core.MemoryWeights(), _core.ThreadPool(1), options)
    with pytest.raises(effinfer.InvalidArgumentError, match=r"\[FrontLayers\] device"):
        _core.FrontLayers("tpu")


@pytest.mark.parametrize("count", [0, 3])
def test_all_layers_on_one_of_two_devices(models, count):
    asks = ragged(3, tiny.VOCAB_SIZE, most=30)
    engine = split(models["llama"], count)
    assert engine.placement == "layers 0 to 2 on cpu (as asked)"
    assert engine.threads == (2 if count == 0 else 1)
    same(run(engine, asks), run(make_engine(models["llama"]), asks))


@pytest.mark.alone
@pytest.mark.skipif(len(CORES) < 2, reason="the process may use one core")
def test_two_sets_of_cores_share_the_layers_by_their_rates(models):
    path = models["gemma3"].path
    device = f"cpu:{CORES[0]}+cpu:{CORES[-1]}"
    params = effinfer.SamplingParams(temperature=0.8, seed=2, max_tokens=20, ignore_eos=True)
    with effinfer.LLM(path, device=f"cpu:{CORES[0]}") as llm:
        expected = llm.generate([[5, 6, 7]], params)[0].token_ids
    with effinfer.LLM(path, device=device) as llm:
        assert llm.generate([[5, 6, 7]], params)[0].token_ids == expected
        explained = llm.explain()
        assert explained.startswith("layer") and explained.count("\ngraph ") == 2
        assert explained.splitlines()[0].count("reads memory at") == 2
        assert llm.engine.packed_bytes > 0 and llm.engine.arena_bytes > 0


@pytest.mark.skipif(len(CORES) < 2, reason="the process may use one core")
def test_two_sets_of_cores_have_the_bits_of_one(isa):
    params = effinfer.SamplingParams(temperature=0.0, max_tokens=3, logprobs=0)
    found = []
    for device in (f"cpu:{CORES[0]}", f"cpu:{CORES[0]}+cpu:{CORES[-1]}"):
        with effinfer.LLM(smollm2_path(), device=device, max_seq_len=256) as llm:
            found.append(llm.generate(["The lighthouse keeper had not spoken"], params)[0].logprobs)
    assert found[0] == found[1]


def test_devices_that_cannot_be_are_refused(models):
    path = models["llama"].path

    def refuses(part: str, **options: Any) -> None:
        with pytest.raises(effinfer.InvalidArgumentError, match=part):
            effinfer.LLM(path, **options)

    refuses(r"\[LLM\] device.*", device="cuda:9+cpu")
    refuses(r"\[LLM\] device", device="cpu+tpu")
    refuses("cores: expected sets that have none in common", device="cpu+cpu")
    refuses("cores: expected sets", device=f"cpu:{CORES[0]}+cpu:{CORES[0]}")
    refuses('expected one device, or two such as "cpu[+]cuda"', device="cpu+cpu+cpu")
    refuses('gpu_layers: expected it with device="cpu[+]cuda"', gpu_layers=3)
    refuses('gpu_layers: expected it with device="cpu[+]cuda"', gpu_layers=3, device="cpu:0")
    done = command("generate", "-m", str(path), "--gpu-layers", "2", "hello")
    assert done.returncode == 2 and "gpu_layers: expected it with device=" in done.stderr


ON_GPU = """
import json, sys
import effinfer

path, device, count, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
found = {}
for precision in ("f32", "fast"):
    llm = effinfer.LLM(
        path, device=device, gpu_layers=count, precision=precision, max_seq_len=256, num_pages=8
    )
    found[precision] = llm.logits(tokens).tolist()
found["explain"] = llm.explain()
params = [
    effinfer.SamplingParams(max_tokens=12, ignore_eos=True, temperature=t, seed=3)
    for t in (0.9, 0.0)
]
prompts = [list(range(3, 70)), [5, 6, 7]]
found["alone"] = [llm.generate([p], s)[0].token_ids for p, s in zip(prompts, params)]
found["pair"] = [o.token_ids for o in llm.generate(prompts, params)]
llm = effinfer.LLM(
    path, device=device, gpu_layers=count, max_seq_len=256, num_pages=8, speculation="recycling"
)
drafted = llm.generate(prompts, params)
found["drafted"] = [o.token_ids for o in drafted]
found["cached"] = llm.generate(prompts[:1], params[0])[0].metrics.cached_tokens
llm.engine.kv_cache.check_integrity()
for wrong in (-1, 9):
    try:
        effinfer.LLM(path, device=device, gpu_layers=wrong)
    except effinfer.InvalidArgumentError as error:
        found[str(wrong)] = str(error)
print(json.dumps(found))
"""


@pytest.mark.skipif(not EMULATED, reason="needs EFFINFER_EMULATED: see `make test`")
@pytest.mark.parametrize(
    ("name", "device", "count"),
    [("llama", "cuda+cpu", 1), ("llama", "cpu+cuda", 2), ("gemma3", "cpu+cuda:0", 3)],
)
def test_a_gpu_and_the_cpu_share_the_layers(models, name, device, count):
    path, layers = models[name].path, SHAPES[name][0]
    tokens = list(range(2, 72))
    done = subprocess.run(
        [sys.executable, "-c", ON_GPU, str(path), device, str(count), json.dumps(tokens)],
        env=os.environ | {"LD_PRELOAD": EMULATED},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    with effinfer.LLM(path, precision="f32") as llm:
        expected = np.asarray(llm.logits(tokens))
    distance = {
        key: np.linalg.norm(np.asarray(found[key]) - expected) / np.linalg.norm(expected)
        for key in ("f32", "fast")
    }
    # Rounding of sums in another order; of activations to bfloat16 and to int8.
    assert distance["f32"] < 1e-5 and 1e-5 < distance["fast"] < 0.05
    front = count if device.startswith("cuda") else layers - count
    first, second = ("cpu" if part == "cpu" else "cuda:0" for part in device.split("+"))
    ranges = [
        f"layer {a} on" if a == b else f"layers {a} to {b} on"
        for a, b in ((0, front - 1), (front, layers - 1))
    ]
    top = f"{ranges[0]} {first}, {ranges[1]} {second} (as asked)"
    assert found["explain"].splitlines()[0] == top
    assert found["explain"].count("device cuda:0") == found["explain"].count("device cpu") == 1
    assert found["pair"] == found["alone"] == found["drafted"]
    assert found["cached"] == 64
    for wrong in ("-1", "9"):
        assert (
            f"gpu_layers: expected 0..{layers}, as the model has them, got {wrong}" in found[wrong]
        )

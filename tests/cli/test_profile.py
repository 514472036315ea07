"""`effinfer bench --profile` and `--trace`."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from effinfer.testing import make_model
from tests.reference import tiny

pytestmark = pytest.mark.alone

THREADS = 2
EMULATED = os.environ.get("EFFINFER_EMULATED", "")
CORES = sorted(os.sched_getaffinity(0))


def bench(*arguments: object, **environment: str) -> subprocess.CompletedProcess:
    options = ["--pp", 70, "--tg", 6, "--repeat", 1, "--threads", THREADS]
    return subprocess.run(
        [sys.executable, "-m", "effinfer", "bench", *map(str, [*options, *arguments])],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=120,
    )


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> Path:
    return tiny.write_gguf(tiny.FAMILIES["llama"], tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def measured(tiny_model, tmp_path_factory) -> tuple[dict[str, Any], dict[str, Any]]:
    """The JSON object with its profile, and the trace."""
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    result = bench("-m", tiny_model, "--profile", "--trace", path, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout), json.loads(path.read_text())


def test_profile_rows_make_up_the_step(measured):
    profile = measured[0]["profile"]
    assert profile["threads"] == THREADS
    assert profile["layers"] == 3
    assert profile["read_bandwidth_bytes_s"] > 0
    assert profile["decode"]["steps"] == 6 and profile["decode"]["tokens_per_step"] == 1
    assert profile["prefill"]["tokens_per_step"] == 70
    for phase in ("decode", "prefill"):
        part = profile[phase]
        kernels = part["kernels"]
        times = sum(row["us_per_step"] for row in kernels)
        assert times + part["host_us"] == pytest.approx(part["step_us"])
        assert sum(row["share"] for row in kernels) <= 1
        # Decoding: five a layer and the head. Prefill: one a call.
        calls = sum(row["calls_per_step"] for row in kernels)
        assert part["barriers_per_step"] == (5 * 3 + 1 if phase == "decode" else calls)
        assert part["barriers_per_layer"] == pytest.approx(part["barriers_per_step"] / 3)
        for row in kernels:
            assert 0 <= row["wait_share"] <= 1
            assert row["least_us"] > 0
            expected = row["bytes_per_step"] / row["us_per_step"] * 1e6
            assert row["bytes_s"] == pytest.approx(expected)
            least = row["bytes_per_step"] / profile["read_bandwidth_bytes_s"]
            for name, peak in profile["peak_ops_s"].items():
                if name.split(".") == [row["arithmetic"], row["isa"]]:
                    least = max(least, row["ops_per_step"] / peak)
            percent = 100 * least / row["us_per_step"] * 1e6
            assert row["percent_of_bound"] == pytest.approx(percent)
            assert row["bound"] in ("memory", "compute")
        assert any("attn_q+attn_k+attn_v" in row["what"] for row in kernels)


def test_prefill_does_the_operations_of_its_tokens(measured):
    """The matmul of queries, keys and values has the same operations for each token in both phases
    (those after the last attention are for rows of logits only)."""
    ops = {}
    for phase in ("decode", "prefill"):
        part = measured[0]["profile"][phase]
        (row,) = (row for row in part["kernels"] if "attn_q" in row["what"])
        ops[phase] = row["ops_per_step"] / part["tokens_per_step"]
    assert ops["decode"] == ops["prefill"] > 0


def test_trace_events_nest_in_order_on_a_track_for_each_thread(measured):
    events = measured[1]["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {thread: f"thread {thread}" for thread in range(THREADS)}
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["tid"] for event in slices} == set(names)
    kernels = {}
    for thread in names:
        track = [event for event in slices if event["tid"] == thread]
        kernels[thread] = [event["name"] for event in track if event["cat"] == "kernel"]
        open_ends: list[float] = []
        last = 0.0
        for event in track:
            begin, end = event["ts"], event["ts"] + event["dur"]
            assert begin >= last - 1e-6 and event["dur"] >= 0
            last = begin
            while open_ends and open_ends[-1] <= begin + 1e-6:
                open_ends.pop()
            assert all(end <= outer + 1e-6 for outer in open_ends)
            open_ends.append(end)
    assert kernels[0] == kernels[1]
    steps = [event["name"] for event in slices if event["cat"] == "step"]
    assert steps == ["prefill step"] + 4 * ["decode step"]


def test_profile_prints_tables_on_stderr(tiny_model):
    result = bench("-m", tiny_model, "--profile")
    assert result.returncode == 0, result.stderr
    assert "decode: 6 steps" in result.stderr and "prefill: 3 steps" in result.stderr
    assert "% of bound" in result.stderr and "barriers a step" in result.stderr
    assert "matmul" in result.stderr and "matmul" not in result.stdout
    assert "tok/s" in result.stdout


@pytest.mark.skipif(not EMULATED, reason="needs EFFINFER_EMULATED: see `make test`")
def test_a_gpu_times_its_calls_itself(tiny_model, tmp_path):
    trace = tmp_path / "trace.json"
    flags = ["--device", "cuda", "--tg", 2, "--profile", "--trace", trace, "--json"]
    result = bench("-m", tiny_model, *flags, LD_PRELOAD=EMULATED)
    assert result.returncode == 0, result.stderr
    profile = json.loads(result.stdout)["profile"]
    assert profile["device"] == "cuda:0" and profile["read_bandwidth_bytes_s"] is None
    for phase in ("decode", "prefill"):
        rows = profile[phase]["kernels"]
        assert {row["kernel"] for row in rows} >= {"matmul.cuda", "attention.cuda"}
        assert all(row["us_per_step"] > 0 and row["percent_of_bound"] is None for row in rows)
        times = sum(row["us_per_step"] for row in rows)
        assert times + profile[phase]["host_us"] == pytest.approx(profile[phase]["step_us"])
    assert any(row["what"] == "highest logits" for row in profile["decode"]["kernels"])
    events = json.loads(trace.read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["cuda:0"]
    assert not [event for event in events if event.get("cat") == "wait"]


PLACED = [
    pytest.param(
        ("--device", f"cpu:{CORES[0]}+cpu:{CORES[-1]}"),
        ("cpu", "cpu"),
        marks=pytest.mark.skipif(len(CORES) < 2, reason="the process may use one core"),
    ),
    *(
        pytest.param(
            ("--device", "+".join(pair), "--gpu-layers", 1, "--threads", 1),
            tuple("cuda:0" if name == "cuda" else name for name in pair),
            marks=pytest.mark.skipif(not EMULATED, reason="needs EFFINFER_EMULATED"),
        )
        for pair in (("cuda", "cpu"), ("cpu", "cuda"))
    ),
]


@pytest.mark.parametrize(("flags", "devices"), PLACED, ids=lambda value: "+".join(map(str, value)))
def test_a_trace_shows_both_halves_of_a_placed_model(tiny_model, tmp_path, flags, devices):
    trace = tmp_path / "trace.json"
    preload = {"LD_PRELOAD": EMULATED} if "cuda:0" in devices else {}
    flags = (*flags, "--threads", 1, "--tg", 2, "--trace", trace)
    result = bench("-m", tiny_model, *flags, **preload)
    assert result.returncode == 0, result.stderr
    events = json.loads(trace.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    halves = [
        f"{part} layers on {name}" for part, name in zip(["first", "last"], devices, strict=True)
    ]
    assert sorted(names.values()) == sorted(halves)
    tracks = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    steps: dict[str, list[tuple[float, float]]] = {half: [] for half in halves}
    kernels: dict[str, set[str]] = {half: set() for half in halves}
    for event in (event for event in events if event["ph"] == "X"):
        half = names[event["pid"]]
        assert tracks[event["pid"]] == ("cuda:0" if "cuda" in half else "thread 0")
        if event["cat"] == "step":
            steps[half].append((event["ts"], event["ts"] + event["dur"]))
        elif event["cat"] == "kernel":
            kernels[half].add(event["name"])
    first, last = (steps[half] for half in halves)
    assert len(first) == len(last) == 5  # two of the prompt, or one, and tokens
    for before, behind, after in zip(first, last, [*first[1:], (math.inf, math.inf)], strict=True):
        assert before[1] <= behind[0] + 1e-6 and behind[1] <= after[0] + 1e-6
    # Each has layers, the first the embedding, and the last the head.
    for part, has_part in (
        ("attention.", [True, True]), ("embedding.", [True, False]), (" output ", [False, True]),
    ):  # fmt: skip
        assert [any(part in name for name in kernels[half]) for half in halves] == has_part


def test_ternary_products_have_a_peak(tmp_path):
    model = make_model("bitnet-tiny", tmp_path / "bitnet.gguf")
    result = bench("-m", model, "--profile", "--json")
    assert result.returncode == 0, result.stderr
    profile = json.loads(result.stdout)["profile"]
    rows = [r for r in profile["decode"]["kernels"] if r["arithmetic"] == "int8_token"]
    assert {row["what"].split()[0] for row in rows} >= {"blk.attn_output", "blk.ffn_down"}
    assert all(row["percent_of_bound"] > 0 for row in rows)

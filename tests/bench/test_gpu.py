"""bench/gpu.py where there is no GPU, and its table from a canned run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import gpu  # noqa: E402
import gpu_peers  # noqa: E402
import store  # noqa: E402
from gpu_table import table  # noqa: E402

# On machines with a GPU, too.
NO_DEVICE = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "MAKEFLAGS": ""}


@pytest.mark.parametrize("arguments", [[], ["--look"], ["--skip", "tests,peers"]])
def test_without_a_gpu_it_says_so(arguments):
    command = [sys.executable, str(ROOT / "bench" / "gpu.py"), *arguments]
    done = subprocess.run(command, env=NO_DEVICE, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("bench-gpu: needs a CUDA device: ")


def test_make_ends_with_the_same_line():
    command = ["make", "-C", str(ROOT), "bench-gpu", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, env=NO_DEVICE, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("bench-gpu: needs a CUDA device: ")


def test_an_unknown_part_is_refused():
    command = [sys.executable, str(ROOT / "bench" / "gpu.py"), "--skip", "test"]
    done = subprocess.run(command, env=NO_DEVICE, capture_output=True, text=True)
    assert done.returncode == 2
    assert "unknown part test" in done.stderr


def test_a_compiler_is_needed(monkeypatch):
    monkeypatch.setattr(gpu, "driver_error", lambda: None)
    monkeypatch.setattr(gpu.shutil, "which", lambda name: None)
    assert gpu.missing() == "needs nvcc on the PATH: it builds the CUDA backend"


@pytest.mark.parametrize(
    ("output", "verdict"),
    [
        ("... 3 tests\n========= ERROR SUMMARY: 0 errors\n", "clean"),
        ("========= Invalid read\n========= ERROR SUMMARY: 12 errors\n", "12 errors"),
        (
            "========= Error: Device not supported\n",
            "did not run: ========= Error: Device not supported",
        ),
        ("", "did not run: no output"),
    ],
)
def test_what_the_sanitizer_says(output, verdict):
    assert gpu.sanitizer_verdict(output) == verdict


def test_half_a_line_of_a_stopped_program_is_no_row():
    assert gpu.parse_rows('{"section": "copy"}\nnoise\n3\n{"section": "mat') == [
        {"section": "copy"}
    ]


def test_a_command_that_takes_too_long_is_stopped(tmp_path, capsys):
    run = gpu.Run(tmp_path)
    program = "import time; print('some', flush=True); time.sleep(60)"
    done = run.command("a test", [sys.executable, "-c", program], 2)
    assert (done.returncode, done.stdout) == (124, "some\n")
    assert "stopped after 2 s" in capsys.readouterr().err


def test_paths_of_results(tmp_path):
    path = gpu.result_path("NVIDIA H100 80GB HBM3", tmp_path)
    assert path == tmp_path / "gpu-nvidia-h100-80gb-hbm3.json"
    # The reports of CPUs pass them over.
    path.write_text("{}")
    assert store.by_coverage(tmp_path) == []


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_whole_run(tmp_path, monkeypatch, capsys):
    build, tools = tmp_path / "build", tmp_path / "tools"
    program(build / "tests" / "gpu" / "test_gpu_elementwise", "exit 0")
    program(build / "tests" / "gpu" / "test_gpu_rope", "exit 1")
    (build / "tests" / "gpu" / "test_gpu_folder").mkdir()
    rows = [{"section": "device", "name": "GPU 1"}, *canned()["rows"]]
    program(build / "bench" / "bench_gpu", "\n".join(f"echo '{json.dumps(row)}'" for row in rows))
    program(tools / "nvidia-smi", "echo GPU 1, 580")
    program(tools / "compute-sanitizer", '"$1" && echo ERROR SUMMARY: 0 errors >&2')
    program(tools / "python3", """echo '{"note": "no PyTorch"}'""")
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    monkeypatch.setattr(gpu, "missing", lambda: None)
    monkeypatch.setattr(gpu, "build", lambda run: None)
    monkeypatch.setattr(gpu.sys, "executable", str(tools / "python3"))
    monkeypatch.setattr(
        gpu.sys, "argv", ["gpu.py", "--build-dir", str(build), "--out", str(tmp_path)]
    )
    assert gpu.main() == 1  # a device test failed
    result = json.loads((tmp_path / "gpu-gpu-1.json").read_text())
    assert result["tests"] == {"test_gpu_elementwise": 0, "test_gpu_rope": 1}
    assert result["failed"] == ["test_gpu_rope"]
    assert result["sanitizer"] == "clean"
    assert result["notes"] == ["no PyTorch"]
    assert result["rows"] == canned()["rows"]
    assert "bf16 4096x4096 n=1" in capsys.readouterr().out


MATMUL = {"section": "matmul", "dtype": "bf16", "rows": 4096, "cols": 4096, "n": 1}
ATTENTION = {"section": "attention", "batch": 8, "context": 1024, "group": 4, "rows": 1}


def canned() -> dict[str, Any]:
    return {
        "commit": "abc",
        "driver": "H100, 580",
        "device": {"name": "NVIDIA H100"},
        "notes": ["no FlashInfer"],
        "tests": {"test_gpu_norm": 0, "test_gpu_rope": 1, "test_gpu_skipped": 77},
        "sanitizer": "clean",
        "rows": [
            {"section": "copy", "bytes": 3_000_000_000, "flops": 0, "median_us": 1000.0},
            {**MATMUL, "bytes": 30_000_000, "flops": 4_000_000_000, "median_us": 20.0},
            {**ATTENTION, "bytes": 60_000_000, "flops": 4_000_000, "median_us": 25.0},
        ],
        "peers": [
            {"section": "ceiling", "peer": "torch", "flops": 800e12, "median_us": 1e6},
            {**MATMUL, "peer": "torch", "median_us": 30.0},
            {**ATTENTION, "group": 8, "peer": "flashinfer", "median_us": 1.0},
        ],
        "failed": ["test_gpu_rope"],
    }


def test_the_table():
    lines = table(canned()).splitlines()
    assert "copy: 3.00 TB/s" in lines
    assert "bf16 products: 800 TFLOP/s (torch.matmul)" in lines
    assert "device tests: 1 of 3 programs passed, FAILED: test_gpu_rope" in lines
    assert lines[-1] == "FAILED: test_gpu_rope"
    matmul = next(line for line in lines if line.startswith("bf16 4096x4096 n=1"))
    assert matmul.split("n=1")[1].split() == [
        "20.0",
        "1500",
        "50",
        "%",
        "200.0",
        "torch",
        "30.0,",
        "1.50x",
    ]
    # The peer's row is of another case.
    attention = next(line for line in lines if line.startswith("batch 8 kv 1024 group 4 rows 1"))
    assert attention.split()[8:12] == ["25.0", "2400", "80", "%"]
    assert "flashinfer" not in attention
    assert "norms: not measured" in lines


def test_what_is_not_measured_is_not_made_up():
    result = {**canned(), "rows": [], "peers": [], "tests": {}, "failed": []}
    text = table(result)
    assert "copy: not measured" in text
    assert "bf16 products: not measured" in text
    assert "device tests: not run" in text
    assert "matmul: not measured" in text


def test_peers_that_are_not_there_are_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert gpu_peers.main() == 0
    assert "no PyTorch" in gpu.parse_rows(capsys.readouterr().out)[0]["note"]

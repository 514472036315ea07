"""Everything that needs a machine with a GPU, in one go and less than ten minutes.

gpu.py [--skip tests,sanitizer,bench,peers] [--build-dir build/gpu] [--out FOLDER]
gpu.py --look     exit status 2 and a line of what is missing, or nothing

Builds the CUDA backend for this GPU, runs the tests of its kernels on it (one of them under
compute-sanitizer too, where that is installed), measures the kernels as shares of the bandwidth
with which this GPU copies (bench/gpu/), and beside them FlashInfer and PyTorch where a Python on
the PATH has them. A table goes to stdout, everything to bench/results/gpu-<device>.json.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_table import table

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("tests", "sanitizer", "bench", "peers")
BUDGET_S = 570.0
SMALLEST_TEST = "test_gpu_elementwise"

Row = dict[str, Any]


@dataclass
class Run:
    """What was found so far; each step has what is left of the time."""

    build: Path
    started: float = field(default_factory=time.monotonic)
    failed: list[str] = field(default_factory=list)

    def left(self, at_most: float) -> float:
        return max(1.0, min(at_most, BUDGET_S - (time.monotonic() - self.started)))

    def command(
        self, name: str, command: list[str], at_most: float, *, merge: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Its output, with what it says of errors if `merge`; past its time it has status 124."""
        print(f"bench-gpu: {name} ...", file=sys.stderr, flush=True)
        limit = self.left(at_most)
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                timeout=limit,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if merge else None,
            )
        except subprocess.TimeoutExpired as error:
            partial = error.stdout or b""
            text = partial.decode() if isinstance(partial, bytes) else partial
            done = subprocess.CompletedProcess(command, 124, text)
            print(f"bench-gpu: {name}: stopped after {limit:.0f} s", file=sys.stderr)
        if done.returncode != 0:
            print(done.stdout[-6000:], file=sys.stderr)
        return done


def driver_error() -> str | None:
    """Why the NVIDIA driver offers no device, or None."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "needs a CUDA device: no NVIDIA driver (libcuda.so.1) is installed"
    status = driver.cuInit(0)
    count = ctypes.c_int(0)
    if status == 0:
        driver.cuDeviceGetCount(ctypes.byref(count))
    if status != 0 or count.value == 0:
        return f"needs a CUDA device: the NVIDIA driver offers none (cuInit: {status})"
    return None


def missing() -> str | None:
    if error := driver_error():
        return error
    if shutil.which("nvcc") is None:
        return "needs nvcc on the PATH: it builds the CUDA backend"
    return None


def architecture() -> int:
    """Of the first device: compute capability times ten."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuInit(0)
    numbers = []
    for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
        value = ctypes.c_int(0)
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, 0)
        numbers.append(value.value)
    return numbers[0] * 10 + numbers[1]


def driver_version() -> str:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return "unknown: no nvidia-smi"
    query = [smi, "--query-gpu=name,driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True)
    return done.stdout.splitlines()[0] if done.stdout else done.stderr.strip()


def build(run: Run) -> None:
    arch = architecture()
    # Hopper's own instructions are only in its "a" architecture.
    archs = "90a-real" if arch == 90 else f"{arch}-real"
    flags = ["-DEFFINFER_TESTS=ON", "-DEFFINFER_CUDA=ON", "-DEFFINFER_GPU_TESTS=device"]
    flags += [f"-DEFFINFER_CUDA_ARCHITECTURES={archs}", "-DCMAKE_BUILD_TYPE=Release"]
    if shutil.which("ccache"):
        flags.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
    steps = [
        ["cmake", "-S", str(ROOT), "-B", str(run.build), "-G", "Ninja", *flags],
        ["cmake", "--build", str(run.build), "--target", "gpu_tests", "bench_gpu"],
    ]
    for step in steps:
        if run.command(" ".join(step[:2]), step, 420).returncode != 0:
            sys.exit(f"bench-gpu: failed: {' '.join(step)}")


def run_tests(run: Run) -> Row:
    """Every test program on the device: its exit status by name (77: all of it skipped)."""
    found = sorted((run.build / "tests" / "gpu").glob("test_gpu_*"))
    programs = [path for path in found if os.access(path, os.X_OK) and path.is_file()]
    # Most of their time is the host's.
    with ThreadPoolExecutor(max_workers=max(1, (os.cpu_count() or 1) // 2)) as pool:
        done = pool.map(lambda program: run.command(program.name, [str(program)], 60), programs)
        statuses = {
            program.name: result.returncode for program, result in zip(programs, done, strict=True)
        }
    run.failed += [name for name, status in statuses.items() if status not in (0, 77)]
    if not statuses:
        run.failed.append("tests: none was built")
    return statuses


def sanitizer_verdict(output: str) -> str:
    """What compute-sanitizer found: "clean", errors, or why it did not run."""
    found = re.search(r"ERROR SUMMARY: (\d+) error", output)
    # On a device that it does not know it says no summary at all, or one without having run.
    if found is None or "Device not supported" in output:
        lines = output.strip().splitlines() or ["no output"]
        return f"did not run: {lines[-1]}"
    return "clean" if found[1] == "0" else f"{found[1]} errors"


def run_sanitizer(run: Run) -> str:
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return "not run: no compute-sanitizer on the PATH"
    program = run.build / "tests" / "gpu" / SMALLEST_TEST
    done = run.command("compute-sanitizer", [tool, str(program)], 90, merge=True)
    verdict = sanitizer_verdict(done.stdout)
    if verdict.endswith("errors"):
        run.failed.append(f"compute-sanitizer: {verdict}")
    return verdict


def parse_rows(output: str) -> list[Row]:
    """The JSON objects of an output's lines; a program that was stopped may leave half a line."""
    rows = []
    for line in output.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def run_bench(run: Run) -> list[Row]:
    done = run.command("the kernels", [str(run.build / "bench" / "bench_gpu")], 180)
    if done.returncode != 0:
        run.failed.append(f"bench_gpu: status {done.returncode}")
    return parse_rows(done.stdout)


def peer_pythons() -> list[str]:
    """Interpreters that may have PyTorch."""
    found = [sys.executable, shutil.which("python3")]
    return list(dict.fromkeys(path for path in found if path))


def run_peers(run: Run) -> tuple[list[Row], list[str]]:
    """What peers take, and what is to be said of those that are not there."""
    script = str(ROOT / "bench" / "gpu_peers.py")
    notes: list[str] = []
    for python in peer_pythons():
        done = run.command(f"peers in {python}", [python, script], 200)
        rows = parse_rows(done.stdout)
        notes = [row["note"] for row in rows if "note" in row]
        if measured := [row for row in rows if "note" not in row]:
            return measured, notes
    return [], notes or ["peers: no Python with PyTorch and CUDA on the PATH"]


def result_path(device: str, folder: Path) -> Path:
    return folder / f"gpu-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}.json"


def commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--look", action="store_true")
    parser.add_argument("--skip", default="", help="parts between commas: " + ",".join(PARTS))
    parser.add_argument("--build-dir", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    arguments = parser.parse_args()
    skipped = set(filter(None, arguments.skip.split(",")))
    if unknown := skipped - set(PARTS):
        parser.error(f"--skip: unknown part {sorted(unknown)[0]}")
    if lack := missing():
        print(f"bench-gpu: {lack}", file=sys.stderr)
        return 2
    if arguments.look:
        return 0
    run = Run(arguments.build_dir.resolve())
    result: dict[str, Any] = {
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "driver": driver_version(),
        "notes": [],
    }
    print(f"bench-gpu: {result['driver']}", flush=True)
    build(run)
    result["build_s"] = round(time.monotonic() - run.started)
    if "tests" not in skipped:
        result["tests"] = run_tests(run)
    if "sanitizer" not in skipped:
        result["sanitizer"] = run_sanitizer(run)
    rows = [] if "bench" in skipped else run_bench(run)
    peers: list[Row] = []
    if "peers" not in skipped:
        peers, result["notes"] = run_peers(run)
    devices = [row for row in rows if row["section"] == "device"]
    result["device"] = devices[0] if devices else {"name": result["driver"].split(",")[0]}
    result["rows"] = [row for row in rows if row["section"] != "device"]
    result["peers"] = peers
    result["failed"] = run.failed
    result["seconds"] = round(time.monotonic() - run.started)
    if result["rows"]:  # a run without measurements replaces none
        path = result_path(result["device"]["name"], arguments.out)
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"bench-gpu: {path} written", file=sys.stderr)
    print(table(result))
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())

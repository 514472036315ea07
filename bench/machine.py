"""What the numbers were measured on."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    values = {key.strip(): value.strip() for key, value in fields.items()}
    name = values.get("model name", platform.machine())
    return f"{name} (family {values.get('cpu family')}, model {values.get('model')})"


def read_bandwidth(threads: int, build: Path) -> float | None:
    """Bytes per second that `threads` threads read from memory; None without a C++ compiler."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if not compiler:
        return None
    build.mkdir(parents=True, exist_ok=True)
    program = build / "bandwidth"
    source = FOLDER / "bandwidth.cpp"
    flags = ["-O3", "-march=native", "-std=c++20", "-pthread"]
    subprocess.run([compiler, *flags, str(source), "-o", str(program)], check=True)
    output = subprocess.run(
        [str(program), str(threads)], check=True, capture_output=True, text=True
    ).stdout
    return float(output.split()[0])


def describe(threads: int, build: Path) -> dict[str, Any]:
    load = os.getloadavg()[0]  # before anything here adds to it
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load_average": load,
        "kernel": platform.release().split("-")[0],
        "threads": threads,
        "read_bytes_per_s": read_bandwidth(threads, build),
        "read_bytes_per_s_1_thread": read_bandwidth(1, build),
    }

"""Virtual environments of the peers, made once under build/peers/."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "build" / "peers"


class PeerUnavailable(RuntimeError):
    """A peer that cannot be installed or run here; the message says why."""


@dataclass(frozen=True)
class Peer:
    name: str
    worker: str
    requirements: tuple[str, ...]
    # The instruction sets that it is built for, of those that the CPU has; None: not built here.
    instruction_sets: frozenset[str] | None = None


# CMake option -> the flags of /proc/cpuinfo that it needs.
INSTRUCTION_SETS = {
    "GGML_AVX2": {"avx2"},
    "GGML_FMA": {"fma"},
    "GGML_F16C": {"f16c"},
    "GGML_BMI2": {"bmi2"},
    "GGML_AVX512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "GGML_AVX512_VNNI": {"avx512_vnni"},
    "GGML_AVX512_VBMI": {"avx512vbmi"},
    "GGML_AVX512_BF16": {"avx512_bf16"},
}
# Of these, gcc 12 builds kernels that crash.
AMX = {
    "GGML_AMX_TILE": {"amx_tile"},
    "GGML_AMX_INT8": {"amx_int8"},
    "GGML_AMX_BF16": {"amx_bf16"},
}
CLANGS = ("clang", *(f"clang-{version}" for version in range(22, 15, -1)))
AVX2 = frozenset({"GGML_AVX2", "GGML_FMA", "GGML_F16C", "GGML_BMI2"})
LLAMA_REQUIREMENTS = ("llama-cpp-python[server]==0.3.36", "numpy")
LLAMA_WORKER = "llama_cpp_worker.py"

LLAMA_CPP = Peer("llama.cpp", LLAMA_WORKER, LLAMA_REQUIREMENTS, frozenset(INSTRUCTION_SETS))
LLAMA_CPP_AVX2 = Peer("llama.cpp, avx2", LLAMA_WORKER, LLAMA_REQUIREMENTS, AVX2)
OPENVINO = Peer("openvino", "openvino_worker.py", ("openvino-genai==2026.4.1.0", "numpy"))
PEERS_BY_NAME = {peer.name: peer for peer in (LLAMA_CPP, LLAMA_CPP_AVX2, OPENVINO)}


def cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next(
        (set(line.split(":")[1].split()) for line in lines if line.startswith("flags")), set()
    )


def llama_cpp_cmake_args(wanted: frozenset[str], flags: set[str], amx: bool = False) -> str:
    """Every option spelled out: GGML_NATIVE trusts the compiler's guess, which a virtual machine
    may mislead."""
    options = {"GGML_NATIVE": False}
    for name, needed in INSTRUCTION_SETS.items():
        options[name] = name in wanted and needed <= flags
    for name, needed in AMX.items():
        options[name] = amx and needed <= flags
    return " ".join(f"-D{name}={'ON' if on else 'OFF'}" for name, on in options.items())


def clang() -> str | None:
    """A clang of version 16 or later, which builds AMX."""
    for name in CLANGS:
        if not shutil.which(name) or not shutil.which(name.replace("clang", "clang++")):
            continue
        text = subprocess.run([name, "-dumpversion"], capture_output=True, text=True).stdout
        if text.partition(".")[0].isdecimal() and int(text.partition(".")[0]) >= 16:
            return name
    return None


def build_options(peer: Peer) -> dict[str, str]:
    """The variables that its build reads, on this CPU. What is to have all instruction sets has
    AMX too, where a compiler for it is installed."""
    if peer.instruction_sets is None:
        return {}
    flags = cpu_flags()
    has_amx = all(needed <= flags for needed in AMX.values())
    compiler = clang() if has_amx and peer.instruction_sets == frozenset(INSTRUCTION_SETS) else None
    arguments = llama_cpp_cmake_args(peer.instruction_sets, flags, compiler is not None)
    if compiler is None:
        return {"CMAKE_ARGS": arguments}
    return {
        "CMAKE_ARGS": arguments,
        "CC": compiler,
        "CXX": compiler.replace("clang", "clang++"),
    }


def ensure(peer: Peer) -> Path:
    """The peer's python, installing it first where needed. Raises PeerUnavailable, also for a peer
    that is another one on this CPU: without its instruction sets they are the same build."""
    options = build_options(peer)
    same = (peer.requirements, options)
    first = next(p for p in PEERS_BY_NAME.values() if (p.requirements, build_options(p)) == same)
    if first is not peer:
        raise PeerUnavailable(f"{first.name} is the same build on this CPU")
    folder = PEERS / peer.name.replace(", ", "-")
    python = folder / "bin" / "python"
    environment = os.environ | options
    wanted = "\n".join([*peer.requirements, *(options[name] for name in sorted(options))])
    key = hashlib.sha256(wanted.encode()).hexdigest()
    stamp = folder / "stamp"
    if stamp.exists() and stamp.read_text() == key:
        return python
    print(f"bench: installing {peer.name} (building llama.cpp takes minutes) ...", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "install.log"
    with log.open("w") as output:
        for command in (
            [sys.executable, "-m", "venv", str(folder)],
            [str(python), "-m", "pip", "install", "--no-cache-dir", *peer.requirements],
        ):
            status = subprocess.run(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT
            ).returncode
            if status != 0:
                last = (log.read_text().strip().splitlines() or ["no output"])[-1]
                raise PeerUnavailable(f"not installed: {last}")
    stamp.write_text(key)
    return python

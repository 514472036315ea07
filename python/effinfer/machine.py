"""What effinfer found on this machine and what it will use."""

import platform
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from effinfer import _core
from effinfer.files.paths import tuning_cache_dir

_HUGE_PAGES = {
    "always": "transparent, for all memory",
    "madvise": "transparent, for packed weights and the arena",
    "never": "off in this system",
    "unavailable": "unknown to this system",
}


@dataclass(frozen=True)
class Info:
    version: str
    cpu: str
    isa: str
    isa_reason: str
    available_isas: tuple[str, ...]
    avx512_bf16: bool
    bf16_products: str  # which are chosen of those, and why not more
    matmul_kernels: dict[str, str]  # arithmetic -> kernel; those that run here
    tuning: str  # how far ahead weights are asked for, rows that unpack, and why
    threads: int
    threads_reason: str
    huge_pages: str  # transparent huge pages: "always", "madvise", "never", "unavailable"
    numa_nodes: int
    devices: tuple[str, ...]  # that models and arrays may be on
    backends: dict[str, str]  # name -> state
    python: str

    def __str__(self) -> str:
        backends = "; ".join(f"{name} {state}" for name, state in self.backends.items())
        return (
            f"effinfer   {self.version} (Python {self.python})\n"
            f"cpu        {self.cpu or 'unknown'}\n"
            f"isa        {self.isa}: {self.isa_reason}; available: {', '.join(self.available_isas)}"
            f"{'; AVX512-BF16' if self.avx512_bf16 else ''}\n"
            f"bfloat16   {self.bf16_products}\n"
            f"matmul     {', '.join(f'{a}: {k}' for a, k in self.matmul_kernels.items())}\n"
            f"fetch      {self.tuning}\n"
            f"threads    {self.threads}: {self.threads_reason}\n"
            f"memory     huge pages: {_HUGE_PAGES[self.huge_pages]}; "
            f"NUMA nodes: {self.numa_nodes}\n"
            f"devices    {', '.join(self.devices)}\n"
            f"backends   {backends}"
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def matmul_kernels() -> dict[str, str]:
    kernels = {}
    for arithmetic in ("int8", "bf16", "f32"):
        with suppress(_core.UnsupportedError):
            kernels[arithmetic] = _core.matmul_kernel(arithmetic)
    return kernels


def calibrate(threads: int | None = None) -> None:
    """Measures anew what this machine wants of its kernels, uses it and keeps it in the user's
    cache; a second and 192 MB. threads: those that share memory; None is all.
    Raises FileError when the cache cannot be written, after the measurement."""
    _core.calibrate(_core.ThreadPool(threads or 0), tuning_cache_dir())


def info() -> Info:
    """Version, instruction set and why, kernels of matmul, threads and why, backends."""
    _core.recall_tuning(tuning_cache_dir())
    threads, threads_reason = _core.default_threads()
    huge_pages, numa_nodes = _core.memory_features()
    return Info(
        version=_core.version(),
        cpu=_core.cpu_model(),
        isa=_core.current_isa(),
        isa_reason=_core.isa_reason(),
        available_isas=tuple(_core.available_isas()),
        avx512_bf16=_core.has_avx512_bf16(),
        bf16_products=_core.describe_bf16(),
        matmul_kernels=matmul_kernels(),
        tuning=_core.describe_tuning(),
        threads=threads,
        threads_reason=threads_reason,
        huge_pages=huge_pages,
        numa_nodes=numa_nodes,
        devices=tuple(_core.available_devices()),
        backends={"cpu": _core.cpu_status(), "cuda": _core.cuda_status()},
        python=platform.python_version(),
    )

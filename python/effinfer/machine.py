"""What effinfer found on this machine and what it will use."""

import platform
from dataclasses import asdict, dataclass
from typing import Any

from effinfer import _core


@dataclass(frozen=True)
class Info:
    version: str
    cpu: str
    isa: str
    isa_reason: str
    available_isas: tuple[str, ...]
    avx512_bf16: bool
    threads: int
    threads_reason: str
    backends: dict[str, str]  # name -> state
    python: str

    def __str__(self) -> str:
        backends = "\n".join(f"{name:<11}{state}" for name, state in self.backends.items())
        return (
            f"effinfer   {self.version} (Python {self.python})\n"
            f"cpu        {self.cpu or 'unknown'}\n"
            f"isa        {self.isa}: {self.isa_reason}; available: {', '.join(self.available_isas)}"
            f"{'; AVX512-BF16' if self.avx512_bf16 else ''}\n"
            f"threads    {self.threads}: {self.threads_reason}\n"
            f"{backends}"
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def info() -> Info:
    """Version, instruction set and why, threads and why, backends."""
    threads, threads_reason = _core.default_threads()
    return Info(
        version=_core.version(),
        cpu=_core.cpu_model(),
        isa=_core.current_isa(),
        isa_reason=_core.isa_reason(),
        available_isas=tuple(_core.available_isas()),
        avx512_bf16=_core.has_avx512_bf16(),
        threads=threads,
        threads_reason=threads_reason,
        backends={"cpu": "ready", "cuda": _core.cuda_status()},
        python=platform.python_version(),
    )

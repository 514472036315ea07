"""Efficient LLM inference on the hardware that you have.

    llm = effinfer.LLM("smollm2-135m")
    print(llm.generate("The capital of France is")[0].text)

Names are imported when they are first used: `import effinfer` alone loads neither the native core
nor a tokenizer.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from effinfer import graph, hub, models, ops, speculation, techniques
    from effinfer._core import (
        CancelledError,
        ConflictError,
        DeviceArray,
        DeviceError,
        Error,
        FileError,
        FormatError,
        InternalError,
        InvalidArgumentError,
        OutOfMemoryError,
        Queue,
        UnsupportedError,
    )
    from effinfer.async_llm import AsyncLLM
    from effinfer.checkpoints.quantization import QuantizeResult, quantize
    from effinfer.files.cache_warnings import PackCacheWarning, TuningCacheWarning
    from effinfer.llm import LLM
    from effinfer.machine import info
    from effinfer.outputs import RequestMetrics, RequestOutput
    from effinfer.requests.engine_thread import QueueFullError
    from effinfer.sampling import SamplingParams
    from effinfer.speculation import Speculation, SpeculationWarning

    __version__: str

_ERRORS = (
    "CancelledError",
    "ConflictError",
    "DeviceError",
    "Error",
    "FileError",
    "FormatError",
    "InternalError",
    "InvalidArgumentError",
    "OutOfMemoryError",
    "UnsupportedError",
)
_MODULE_OF = {
    **dict.fromkeys(_ERRORS, "effinfer._core"),
    "AsyncLLM": "effinfer.async_llm",
    "DeviceArray": "effinfer._core",
    "Queue": "effinfer._core",
    "LLM": "effinfer.llm",
    "PackCacheWarning": "effinfer.files.cache_warnings",
    "QuantizeResult": "effinfer.checkpoints.quantization",
    "QueueFullError": "effinfer.requests.engine_thread",
    "RequestMetrics": "effinfer.outputs",
    "RequestOutput": "effinfer.outputs",
    "SamplingParams": "effinfer.sampling",
    "Speculation": "effinfer.speculation",
    "SpeculationWarning": "effinfer.speculation",
    "TuningCacheWarning": "effinfer.files.cache_warnings",
    "info": "effinfer.machine",
    "quantize": "effinfer.checkpoints.quantization",
}
_SUBMODULES = ("graph", "hub", "models", "ops", "speculation", "techniques")

__all__ = [
    "LLM",
    "AsyncLLM",
    "CancelledError",
    "ConflictError",
    "DeviceArray",
    "DeviceError",
    "Error",
    "FileError",
    "FormatError",
    "InternalError",
    "InvalidArgumentError",
    "OutOfMemoryError",
    "PackCacheWarning",
    "QuantizeResult",
    "Queue",
    "QueueFullError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Speculation",
    "SpeculationWarning",
    "TuningCacheWarning",
    "UnsupportedError",
    "graph",
    "hub",
    "info",
    "models",
    "ops",
    "quantize",
    "speculation",
    "techniques",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = import_module("effinfer._core").version()
    elif name in _MODULE_OF:
        value = getattr(import_module(_MODULE_OF[name]), name)
    elif name in _SUBMODULES:
        value = import_module(f"effinfer.{name}")
    else:
        raise AttributeError(f"module 'effinfer' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Published methods of efficient inference, a file each, on the primitives of the engine.

`LLM(model, prefill=...)` takes one of the sparse prefills here, or its name:

    LLM("model.gguf", prefill="minference")
    LLM("model.gguf", prefill=XAttention(threshold=0.95))
"""

from effinfer import _core
from effinfer.techniques.minference import MInference
from effinfer.techniques.prefill import SparsePrefill
from effinfer.techniques.sample_attention import SampleAttention
from effinfer.techniques.xattention import XAttention

__all__ = ["PREFILLS", "MInference", "SampleAttention", "SparsePrefill", "XAttention", "as_prefill"]

PREFILLS: dict[str, type[SparsePrefill]] = {
    "minference": MInference,
    "sample_attention": SampleAttention,
    "xattention": XAttention,
}


def as_prefill(prefill: "str | SparsePrefill") -> SparsePrefill | None:
    """A method by its name, with its defaults; None for "dense". Throws InvalidArgumentError."""
    if isinstance(prefill, SparsePrefill):
        return prefill
    if prefill == "dense":
        return None
    if prefill not in PREFILLS:
        known = ", ".join(["dense", *PREFILLS])
        raise _core.InvalidArgumentError(
            f"[LLM] prefill: expected {known} or a SparsePrefill, got {prefill!r}"
        )
    return PREFILLS[prefill]()

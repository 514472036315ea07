"""Published methods of efficient inference, a file each, on the primitives of the engine.

`LLM(model, prefill=...)` takes one of the sparse prefills here, or its name:

    LLM("model.gguf", prefill="minference")
    LLM("model.gguf", prefill=XAttention(threshold=0.95))

`LLM(model, speculation=...)` takes proposers of drafts, or a name:

    LLM("model.gguf", speculation="auto")
    LLM("model.gguf", speculation=Speculation([SuffixDecoding(), TokenRecycling(width=4)]))
"""

import os
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from effinfer import _core
from effinfer.checkpoints.model_files import ModelFiles
from effinfer.speculation import Proposer, Speculation
from effinfer.techniques.aded import ADED
from effinfer.techniques.code_swift import CodeSwift
from effinfer.techniques.draft_model import DraftModel
from effinfer.techniques.lookahead import Lookahead
from effinfer.techniques.minference import MInference
from effinfer.techniques.multi_sample import MultiSample
from effinfer.techniques.prefill import SparsePrefill
from effinfer.techniques.prompt_lookup import PromptLookup
from effinfer.techniques.sample_attention import SampleAttention
from effinfer.techniques.skip_layers import EarlyExit, SkipLayers
from effinfer.techniques.suffix_decoding import SuffixDecoding
from effinfer.techniques.token_recycling import TokenRecycling
from effinfer.techniques.vocab_trim import VocabTrim
from effinfer.techniques.xattention import XAttention

__all__ = [
    "ADED",
    "PREFILLS",
    "SPECULATIONS",
    "CodeSwift",
    "DraftModel",
    "EarlyExit",
    "Lookahead",
    "MInference",
    "MultiSample",
    "PromptLookup",
    "SampleAttention",
    "SkipLayers",
    "SparsePrefill",
    "SuffixDecoding",
    "TokenRecycling",
    "VocabTrim",
    "XAttention",
    "as_prefill",
    "as_speculation",
    "with_draft_model",
]

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


# What a name speculates with. "auto": how the text went on before, and what pairs of tokens led to.
SPECULATIONS: dict[str, Speculation] = {
    "auto": Speculation([SuffixDecoding(), ADED()]),
    "aded": Speculation([ADED()]),
    "lookahead": Speculation([Lookahead()]),
    "multi_sample": Speculation([MultiSample()]),
    "suffix": Speculation([SuffixDecoding()]),
    "ngram": Speculation([PromptLookup()]),
    "recycling": Speculation([TokenRecycling()]),
}


def as_speculation(speculation: object) -> Speculation | None:
    """By a name; of a single proposer or its recipe; None for "off" and None. Throws
    InvalidArgumentError."""
    if speculation is None or speculation == "off":
        return None
    if isinstance(speculation, Speculation):
        return speculation
    if isinstance(speculation, str) and speculation in SPECULATIONS:
        return SPECULATIONS[speculation]
    if isinstance(speculation, Proposer | _core.Proposer):
        return Speculation([speculation])
    if hasattr(speculation, "build") and not isinstance(speculation, type):
        return Speculation([speculation])
    known = ", ".join(f'"{name}"' for name in ["off", *SPECULATIONS])
    raise _core.InvalidArgumentError(
        f"[LLM] speculation: expected {known} or a Speculation, got {speculation!r}"
    )


def with_draft_model(
    speculation: Speculation | None, draft_model: object, target: ModelFiles
) -> Speculation | None:
    """The same with a model's drafts merged in; its DraftModels become proposers for `target`.
    Throws InvalidArgumentError, and what opening a model throws."""
    given = [] if speculation is None else speculation.proposers
    # What is no list is refused when the parts are made.
    proposers: list[Any] = list(given) if isinstance(given, Iterable) else []
    if isinstance(draft_model, str | os.PathLike):
        draft_model = DraftModel(draft_model)
    if isinstance(draft_model, DraftModel):
        proposers.append(draft_model)
    elif draft_model is not None:
        raise _core.InvalidArgumentError(
            f"[LLM] draft_model: expected a model or a DraftModel, got {draft_model!r}"
        )
    if not any(isinstance(p, DraftModel) for p in proposers):
        return speculation
    built = [p.for_target(target) if isinstance(p, DraftModel) else p for p in proposers]
    return replace(speculation or Speculation([]), proposers=built)

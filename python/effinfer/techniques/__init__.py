"""Published methods of efficient inference, a file each, on the primitives of the engine.

`LLM(model, techniques=[...])` takes Techniques, or their names; `effinfer techniques` lists them.
For one sparse prefill `prefill=` is a short form:

    LLM("model.gguf", techniques=[XAttention(threshold=0.95)])
    LLM("model.gguf", prefill="minference")

`LLM(model, speculation=...)` takes proposers of drafts, or a name:

    LLM("model.gguf", speculation=Speculation([SuffixDecoding(), TokenRecycling(width=4)]))
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from effinfer import _core
from effinfer.checkpoints.model_files import ModelFiles
from effinfer.speculation import Proposer, Speculation
from effinfer.techniques.aded import ADED
from effinfer.techniques.bild import BiLD
from effinfer.techniques.bita import BiTA
from effinfer.techniques.chimera import Chimera
from effinfer.techniques.code_swift import CodeSwift
from effinfer.techniques.dense_store import DenseStore
from effinfer.techniques.draft_model import DraftModel, LayerRewrite
from effinfer.techniques.dresd import DReSD
from effinfer.techniques.dynamic_exit import DEL
from effinfer.techniques.eagle import Eagle
from effinfer.techniques.easy_spec import EasySpec
from effinfer.techniques.eesd import EESD
from effinfer.techniques.first import FiRST
from effinfer.techniques.glide import GliDe
from effinfer.techniques.gumiho import Gumiho
from effinfer.techniques.heads import Heads
from effinfer.techniques.hidden_transfer import HiddenTransfer
from effinfer.techniques.hydra import Hydra
from effinfer.techniques.installed import PREFILLS, Installed, as_prefill
from effinfer.techniques.kangaroo import Kangaroo
from effinfer.techniques.kv_methods import H2O, KIVI, Quest, SnapKV, StreamingLLM, WindowKV
from effinfer.techniques.long_spec import LongSpec
from effinfer.techniques.lookahead import Lookahead
from effinfer.techniques.m2r2 import M2R2
from effinfer.techniques.medusa import Medusa
from effinfer.techniques.minference import MInference
from effinfer.techniques.multi_sample import MultiSample
from effinfer.techniques.parallel_spec import ParallelSpec
from effinfer.techniques.pard import PARD
from effinfer.techniques.pass_rows import PaSS
from effinfer.techniques.ppd import PPD
from effinfer.techniques.prefill import SparsePrefill
from effinfer.techniques.prompt_lookup import PromptLookup
from effinfer.techniques.rapid import RAPID
from effinfer.techniques.recipes import DraftRecipe, SpeculationRecipe
from effinfer.techniques.registry import REGISTRY
from effinfer.techniques.rsd import RSD
from effinfer.techniques.sample_attention import SampleAttention
from effinfer.techniques.setup import EngineSetup, RequestSetup, hook
from effinfer.techniques.skeleton import SkeletonOfThought
from effinfer.techniques.skip_decode import SkipDecode
from effinfer.techniques.skip_layers import EarlyExit, SkipLayers
from effinfer.techniques.spec_reason import SpecReason
from effinfer.techniques.staged import StagedDraft
from effinfer.techniques.suffix_decoding import SuffixDecoding
from effinfer.techniques.target_extension import TargetExtension, extended
from effinfer.techniques.technique import Meta, Technique
from effinfer.techniques.token_recycling import TokenRecycling
from effinfer.techniques.unified_skip import UnifiedSkip
from effinfer.techniques.vocab_trim import VocabTrim
from effinfer.techniques.xattention import XAttention

__all__ = [
    "ADED",
    "DEL",
    "H2O",
    "KIVI",
    "PREFILLS",
    "RAPID",
    "REGISTRY",
    "RSD",
    "SPECULATIONS",
    "BiLD",
    "CodeSwift",
    "DraftModel",
    "DraftRecipe",
    "DraftSource",
    "Eagle",
    "EarlyExit",
    "EasySpec",
    "EngineSetup",
    "FiRST",
    "Gumiho",
    "Heads",
    "Hydra",
    "Installed",
    "LayerRewrite",
    "Lookahead",
    "MInference",
    "Medusa",
    "Meta",
    "MultiSample",
    "PromptLookup",
    "Quest",
    "RequestSetup",
    "SampleAttention",
    "SkeletonOfThought",
    "SnapKV",
    "SkipDecode",
    "SkipLayers",
    "SparsePrefill",
    "SpecReason",
    "SpeculationRecipe",
    "StreamingLLM",
    "StagedDraft",
    "Technique",
    "Techniques",
    "SuffixDecoding",
    "TokenRecycling",
    "UnifiedSkip",
    "VocabTrim",
    "WindowKV",
    "XAttention",
    "as_prefill",
    "as_speculation",
    "prepare",
    "hook",
    "with_draft_model",
    "with_layers",
    "BiTA",
    "Chimera",
    "DenseStore",
    "DReSD",
    "EESD",
    "GliDe",
    "HiddenTransfer",
    "Kangaroo",
    "LongSpec",
    "M2R2",
    "ParallelSpec",
    "PARD",
    "PaSS",
    "PPD",
    "TargetExtension",
]

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
    if isinstance(speculation, DraftModel | Heads):
        return Speculation([speculation])
    if hasattr(speculation, "build") and not isinstance(speculation, type):
        return Speculation([speculation])
    known = ", ".join(f'"{name}"' for name in ["off", *SPECULATIONS])
    raise _core.InvalidArgumentError(
        f"[LLM] speculation: expected {known} or a Speculation, got {speculation!r}"
    )


def parts(
    techniques: object, prefill: object, speculation: object
) -> tuple[Installed, Speculation | None]:
    """What is asked of a model. Throws InvalidArgumentError, ConflictError."""
    return Installed(techniques, prefill), as_speculation(speculation)


def with_layers(files: ModelFiles, layers: object) -> ModelFiles:
    """The model with fewer or other layers; None leaves it as it is. Throws
    InvalidArgumentError."""
    if layers is None:
        return files
    rewrite = getattr(layers, "apply", None)
    if isinstance(layers, type | VocabTrim) or not callable(rewrite):
        raise _core.InvalidArgumentError(
            f"[LLM] layers: expected None or a rewrite such as UnifiedSkip, got {layers!r}"
        )
    return replace(files, graph=rewrite(files.graph))


Techniques = str | Technique | Sequence[str | Technique]
DraftSource = str | os.PathLike[str] | DraftRecipe | SpeculationRecipe


def prepare(
    files: ModelFiles,
    layers: object,
    installed: Installed,
    speculation: Speculation | None,
    draft_model: object,
) -> tuple[ModelFiles, EngineSetup]:
    """A model, and what its engine takes beside it. Throws what their recipes throw."""
    files = extended(with_layers(files, layers), speculation, draft_model)
    setup = installed.setup(files.graph, speculation)
    setup.speculation = with_draft_model(setup.speculation, draft_model, files)
    return files, setup


def with_draft_model(
    speculation: Speculation | None, draft_model: object, target: ModelFiles
) -> Speculation | None:
    """The same with a model's drafts merged in; recipes become proposers for `target`. Throws
    InvalidArgumentError, and what opening a model throws."""
    given = [] if speculation is None else speculation.proposers
    # What is no list is refused when the parts are made.
    proposers: list[Any] = list(given) if isinstance(given, Iterable) else []
    if isinstance(draft_model, str | os.PathLike):
        draft_model = DraftModel(draft_model)
    if isinstance(draft_model, type):
        raise _wrong_draft_model(draft_model)
    if isinstance(draft_model, SpeculationRecipe):
        if speculation is not None:
            raise _core.InvalidArgumentError(
                f"[LLM] speculation: expected None beside {draft_model!r}, which says all of it"
            )
        return draft_model.speculation(target)
    if isinstance(draft_model, DraftRecipe):
        proposers.append(draft_model)
    elif draft_model is not None:
        raise _wrong_draft_model(draft_model)
    if not any(isinstance(p, DraftRecipe) for p in proposers):
        return speculation
    built = [p.for_target(target) if isinstance(p, DraftRecipe) else p for p in proposers]
    return replace(speculation or Speculation([]), proposers=built)


def _wrong_draft_model(draft_model: object) -> _core.Error:
    return _core.InvalidArgumentError(
        f"[LLM] draft_model: expected a model or a DraftModel, got {draft_model!r}"
    )

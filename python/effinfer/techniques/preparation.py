"""What is asked of a model, and its layers, techniques and drafts as an engine takes them."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from effinfer import _core
from effinfer.checkpoints.model_files import ModelFiles
from effinfer.speculation import Proposer, Speculation
from effinfer.techniques.aded import ADED
from effinfer.techniques.draft_model import DraftModel
from effinfer.techniques.heads import Heads
from effinfer.techniques.installed import Installed
from effinfer.techniques.lookahead import Lookahead
from effinfer.techniques.multi_sample import MultiSample
from effinfer.techniques.prompt_lookup import PromptLookup
from effinfer.techniques.recipes import DraftRecipe, SpeculationRecipe
from effinfer.techniques.setup import EngineSetup
from effinfer.techniques.suffix_decoding import SuffixDecoding
from effinfer.techniques.target_extension import extended
from effinfer.techniques.technique import Technique
from effinfer.techniques.token_recycling import TokenRecycling
from effinfer.techniques.vocab_trim import VocabTrim

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
    rewritten = with_layers(files, layers)
    files = extended(rewritten, speculation, draft_model, installed.techniques)
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

"""What drafts and techniques may ask of a model's own graph and weights."""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from effinfer.checkpoints.model_files import ModelFiles
from effinfer.speculation import Speculation


@runtime_checkable
class TargetExtension(Protocol):
    """A draft recipe, or a technique, that needs more of the target than its graph computes, or its
    file holds: rows with embeddings of their own, states between its layers, weights. What the
    model itself computes keeps its bits."""

    def extend(self, target: ModelFiles) -> ModelFiles: ...


def extended(
    files: ModelFiles,
    speculation: Speculation | None,
    draft_model: object,
    techniques: Iterable[object] = (),
) -> ModelFiles:
    """The model with what its drafts and techniques ask of it. Throws what these throw."""
    given = [] if speculation is None else speculation.proposers
    drafts = given if isinstance(given, Iterable) else []
    for part in [*drafts, draft_model, *techniques]:
        if isinstance(part, TargetExtension) and not isinstance(part, type):
            files = part.extend(files)
    return files

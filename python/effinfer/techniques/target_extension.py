"""What drafts may ask of the target's own graph."""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from effinfer.checkpoints.model_files import ModelFiles
from effinfer.speculation import Speculation


@runtime_checkable
class TargetExtension(Protocol):
    """A draft recipe that needs more of the target than its graph computes: rows with embeddings of
    their own, or states between its layers. What the model itself computes keeps its bits."""

    def extend(self, target: ModelFiles) -> ModelFiles: ...


def extended(files: ModelFiles, speculation: Speculation | None, draft_model: object) -> ModelFiles:
    """The model with what its drafts ask of it. Throws what their recipes throw."""
    given = [] if speculation is None else speculation.proposers
    for part in [*(given if isinstance(given, Iterable) else []), draft_model]:
        if isinstance(part, TargetExtension) and not isinstance(part, type):
            files = part.extend(files)
    return files

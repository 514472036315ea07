"""What `LLM(draft_model=...)` takes beside models: objects that are told which model they serve."""

from typing import Protocol, runtime_checkable

from effinfer import _core
from effinfer.checkpoints.model_files import ModelFiles
from effinfer.speculation import Proposer, Speculation


@runtime_checkable
class DraftRecipe(Protocol):
    """Makes the proposer of one engine, for the model that it is to draft for."""

    def for_target(self, target: ModelFiles) -> _core.Proposer | Proposer: ...


@runtime_checkable
class SpeculationRecipe(Protocol):
    """Says all of how a model speculates: methods that accept by a rule of their own."""

    def speculation(self, target: ModelFiles) -> Speculation: ...

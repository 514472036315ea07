"""Fast Inference from Transformers via Speculative Decoding (Leviathan et al. 2023,
arXiv:2211.17192): a smaller model of the same vocabulary drafts. With a width it grows a tree, as
EAGLE-2 (Li et al. 2024, arXiv:2406.16858) does; where the verifier samples, it draws several
candidates (Multi-Candidate Speculative Decoding, Yang et al. 2024, arXiv:2401.06706).
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from effinfer import _core
from effinfer.checkpoints.model_files import ModelFiles, open_model
from effinfer.hub.progress import resolve_with_bar

_TOKENS = "tokenizer.ggml.tokens"


class LayerRewrite(Protocol):
    """What makes a smaller model of the target's own layers."""

    def apply(self, graph: _core.Graph) -> _core.Graph: ...


class HeadRewrite(Protocol):
    """What gives a model a smaller head."""

    def apply(
        self, graph: _core.Graph, weights: _core.WeightSource
    ) -> tuple[_core.Graph, _core.WeightSource]: ...


@dataclass(frozen=True)
class DraftModel:
    """
    Args:
        model: as `LLM` takes it, or `SkipLayers` or `EarlyExit`: layers of the target itself, over
            its packed weights, with pages of their own.
        length: depth of a draft at most.
        width: nodes of a level that get children, and children of a node; 1: a chain.
        num_pages: 64-token pages of the draft's cache; 0: for one sequence of the context (8192
            tokens at most) and 8192 tokens more.
        adaptive: shorter drafts, down to none, where a level is not worth its measured time; False:
            always `length`, so that texts of "rejection" do not depend on the time.
        head: a `VocabTrim`, for fewer logits. layers: `EasySpec`, or layers to leave out.
        device: "cpu:1", "cuda:0": it drafts there while the target verifies; None: on the target's
            threads, before its step.
    """

    model: str | os.PathLike[str] | LayerRewrite
    length: int = 7
    width: int = 1
    num_pages: int = 0
    adaptive: bool = True
    head: HeadRewrite | None = None
    layers: LayerRewrite | None = None
    device: str | None = None

    def for_target(self, target: ModelFiles) -> _core.Proposer:
        """The proposer of one engine of that model. Throws InvalidArgumentError for another
        vocabulary, and what opening a model throws."""
        own = not isinstance(self.model, str | os.PathLike)
        if isinstance(self.model, str | os.PathLike):
            files = open_model(resolve_with_bar(self.model))
            check_vocabulary(target, files)
            graph, weights = files.graph, files.weights
        else:
            graph, weights = self.model.apply(target.graph), target.weights
        if self.layers is not None:
            graph = self.layers.apply(graph)
        if self.head is not None:
            graph, weights = self.head.apply(graph, weights)
        return _core.draft_model_proposer(
            graph,
            weights,
            of_target=own,
            length=self.length,
            width=self.width,
            num_pages=self.num_pages,
            adaptive=self.adaptive,
            label="self_draft" if own else "draft_model",
            device=self.device or "",
        )


def check_vocabulary(target: ModelFiles, draft: ModelFiles) -> None:
    """Throws InvalidArgumentError naming the first token that differs. Behind the end of the
    shorter list there may be more."""
    theirs = zip(_tokens(target), _tokens(draft), strict=False)
    for token_id, (expected, got) in enumerate(theirs):
        if expected == got:
            continue
        raise _core.InvalidArgumentError(
            f"[LLM] draft_model: expected the vocabulary of {target.path.name}, but token "
            f"{token_id} is {got!r} in {draft.path.name} and not {expected!r}"
        )


def _tokens(files: ModelFiles) -> Iterable[object]:
    listed = files.gguf.get(_TOKENS) if files.gguf is not None else None
    if listed is not None:
        return list(listed)
    tokenizer = files.tokenizer()
    return [tokenizer.token(token_id) for token_id in range(tokenizer.vocab_size)]

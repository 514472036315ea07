"""What heads over a model's last hidden state share: the file that they lie in, and their graphs.

A head reads what the model's own head read before it gave a token, and the token; what it makes of
them multiplies the model's head, cut to frequent tokens (as VocabTrim does). A file of heads is a
GGUF file of `examples/heads/train.py`, for one model: metadata heads.kind, heads.count,
heads.hidden_size, heads.vocab_size, heads.tokens (the ids that drafts may have, rising), and the
weights that the subclass names.
"""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from effinfer import _core
from effinfer.checkpoints.model_files import ModelFiles
from effinfer.graph import GraphBuilder, Value
from effinfer.techniques.trained_parts import TrainedParts
from effinfer.techniques.vocab_trim import CUT, TOKENS_KEY, find_head, with_cut_rows


class HeadGraph:
    """The graph of one head, while it is built. hidden [T, hidden] is what the model had before
    each token, or the state of the head above; embedded [T, hidden] the tokens' embeddings."""

    def __init__(self, target: ModelFiles, weights: _core.WeightSource, hidden_size: int) -> None:
        self.ops = GraphBuilder("heads")
        self.target, self._weights = target, weights
        self.hidden = self.ops.input("hidden", "f32", ["T", hidden_size])

    def weight(self, name: str) -> Value:
        return self.ops.weight(name, self._weights.dtype(name), self._weights.shape(name))

    def linear(self, x: Value, name: str) -> Value:
        return self.ops.linear(x, self.weight(name))

    @property
    def embedded(self) -> Value:
        values = self.target.graph.values
        node = next(node for node in self.target.graph.nodes if node["op"] == "embedding")
        table = self.weight(values[node["inputs"][1]]["weight_name"])
        ids = self.ops.input("token_ids", "i32", ["T"])
        return self.ops.embedding(ids, table, scale=node["attributes"]["scale"])


@dataclass(frozen=True)
class Heads(ABC):
    """
    Args:
        path: a file of heads of this kind, trained for the target.
        length: depth of a draft at most; 0: as many as there are heads, or 5 for one.
        width: nodes of a level that get children, and children of a node; 1: a chain.
        adaptive: shorter drafts, down to none, where a level is not worth its measured time.
    """

    path: str | os.PathLike[str]
    length: int = 0
    width: int = 2
    adaptive: bool = True
    kind: ClassVar[str] = ""

    @abstractmethod
    def build_head(self, graph: HeadGraph, depth: int) -> Value:
        """The head of drafts `depth` (from 0) tokens ahead: [T, hidden], for the cut head."""

    def hands_on(self, _depth: int) -> bool:
        """Whether the next head goes on from what this one made; else from what this one read."""
        return True

    def for_target(self, target: ModelFiles) -> _core.Proposer:
        """The proposer of one engine of that model. Throws InvalidArgumentError for heads of
        another kind or model, FormatError for a file of something else, FileError."""
        parts = TrainedParts(self.path, self.kind, target)
        head, count = find_head(target.graph), parts.count
        name = target.graph.values[head["inputs"][1]]["weight_name"]
        tokens = [int(token) for token in parts.fact("tokens")]
        weights = with_cut_rows(target.weights, name, tokens)
        parts.add_to(weights)
        graphs = [self._graph(target, weights, tokens, depth) for depth in range(count)]
        return _core.draft_model_proposer(
            graphs[0],
            weights,
            of_target=True,
            length=self.length or (count if count > 1 else 5),
            width=self.width,
            adaptive=self.adaptive,
            label=self.kind,
            hidden=head["inputs"][0],
            deeper=graphs[1:],
        )

    def _graph(
        self, target: ModelFiles, weights: _core.WeightSource, tokens: list[int], depth: int
    ) -> _core.Graph:
        graph = HeadGraph(target, weights, int(weights.shape(CUT)[1]))
        rows = graph.ops.input("logit_rows", "i32", ["R"])
        state = graph.ops.select_rows(self.build_head(graph, depth), rows)
        graph.ops.rename(state, "state")
        for key in ("vocab_size", "context_length"):
            graph.ops.set_metadata(key, target.graph.metadata[key])
        graph.ops.set_metadata(TOKENS_KEY, tokens)
        outputs = [graph.linear(state, CUT), *([state] if self.hands_on(depth) else [])]
        return graph.ops.finish(*outputs)

"""VOCABTRIM: Vocabulary Pruning for Efficient Speculative Decoding in LLMs (Goel et al. 2025,
arXiv:2506.22694): a draft model's head computes the logits of frequent tokens only."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from effinfer import _core
from effinfer.graph import GraphBuilder, Value
from effinfer.techniques.rewrite import prune, rewrite

# Graph metadata: the ids that the logits are of, in their order.
TOKENS_KEY = "logit_tokens"
CUT = "head.cut.weight"  # the rows of the head that are left


@dataclass(frozen=True)
class VocabTrim:
    """
    Args:
        tokens: ids that a draft may have; others are never drafted.

    The paper counts tokens in a calibration set, as `of_texts` does.
    """

    tokens: Sequence[int]

    @classmethod
    def of_texts(
        cls, texts: Iterable[str], tokenize: Callable[[str], list[int]], count: int
    ) -> "VocabTrim":
        """The `count` most frequent tokens of some texts."""
        counts = Counter(token for text in texts for token in tokenize(text))
        return cls(sorted(token for token, _ in counts.most_common(count)))

    def apply(
        self, graph: _core.Graph, weights: _core.WeightSource
    ) -> tuple[_core.Graph, _core.WeightSource]:
        """The graph with the smaller head, and its weights: the model's, and the rows of the head
        beside them, with the same bits. Throws InvalidArgumentError for no tokens, unknown ones,
        and ids that do not rise; UnsupportedError for a head that is no matrix."""
        tokens = [int(token) for token in self.tokens]
        head = find_head(graph)
        name = graph.values[head["inputs"][1]]["weight_name"]
        layered = with_cut_rows(weights, name, tokens)

        def cut(builder: GraphBuilder, node: dict[str, Any], inputs: list[Value]) -> Value | None:
            if node["outputs"] != head["outputs"]:
                return None
            weight = builder.weight(CUT, layered.dtype(CUT), layered.shape(CUT))
            builder.set_metadata(TOKENS_KEY, tokens)
            return builder.node(node["op"], inputs[0], weight, **node["attributes"])

        return prune(rewrite(graph, cut)), layered


def with_cut_rows(
    weights: _core.WeightSource, name: str, tokens: Sequence[int]
) -> _core.LayeredWeights:
    """The weights, and the rows of these tokens of the head `name` as `CUT`."""
    if not tokens or any(b <= a for a, b in zip(tokens, tokens[1:], strict=False)):
        raise _core.InvalidArgumentError("[VocabTrim] tokens: expected ids in rising order")
    layered = _core.LayeredWeights(weights)
    shape = [len(tokens), weights.shape(name)[1]]
    layered.add(CUT, weights.rows(name, tokens), weights.dtype(name), shape)
    return layered


def find_head(graph: _core.Graph) -> dict[str, Any]:
    """The product that the logits come of; a bias would have to be cut with it."""
    makers: dict[str, dict[str, Any]] = {node["outputs"][0]: node for node in graph.nodes}
    node = makers[graph.outputs[0]]
    while node["op"] not in ("linear", "ternary_linear") and len(node["inputs"]) == 1:
        node = makers[node["inputs"][0]]
    if node["op"] != "linear" or len(node["inputs"]) != 2:
        raise _core.UnsupportedError("[VocabTrim] expected a head that is one matrix")
    return node

"""Which channels of keys tell most of how high a model's logits are, by a text of one's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from effinfer import _core
from effinfer.techniques.graph_steps import GraphSteps
from effinfer.techniques.rewrite import prune

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from effinfer.checkpoints.model_files import ModelFiles

    Floats: TypeAlias = npt.NDArray[np.float32]

LEAST_TOKENS = 256
_MOST_TOKENS = 512  # one step


def strongest_channels(files: ModelFiles, ids: Sequence[int], count: int) -> list[int]:
    """Of each layer's each KV head `count` channels, ascending, in pairs of neighbours (2 i, 2 i +
    1): of bf16 keys these lie together. Throws InvalidArgumentError."""
    if len(ids) < LEAST_TOKENS:
        raise _core.InvalidArgumentError(
            f"[calibrate] text: expected at least {LEAST_TOKENS} tokens, got {len(ids)}"
        )
    found: list[int] = []
    for q, k in queries_and_keys(files, ids[:_MOST_TOKENS]):
        found += _strongest(q, k, count)
    return found


def queries_and_keys(files: ModelFiles, ids: Sequence[int]) -> Iterator[tuple[Floats, Floats]]:
    """Of a text that is fed in one step, of each layer: q [tokens, KV heads, query heads of one,
    dim] and k [tokens, KV heads, dim], as attention has them."""
    layers = [node for node in files.graph.nodes if node["op"] == "attention"]
    handles = {node["outputs"][0]: node for node in files.graph.nodes if node["op"] == "kv_append"}
    names: dict[str, str] = {}
    for i, node in enumerate(layers):
        q, kv = node["inputs"][:2]
        names |= {q: f"calibrate.q.{i}", handles[kv]["inputs"][0]: f"calibrate.k.{i}"}
    steps = GraphSteps.of(files, prune(files.graph, names), len(ids))
    steps.feed(steps.begin(), ids)
    for i, node in enumerate(layers):
        heads, dim = (node["attributes"][name] for name in ("kv_heads", "head_dim"))
        q, k = (steps.executable.output(f"calibrate.{name}.{i}") for name in "qk")
        yield q.reshape(len(ids), heads, -1, dim), k.reshape(len(ids), heads, dim)


def _strongest(q: Floats, k: Floats, count: int) -> list[int]:
    """A channel's products with a query spread over keys as the keys' channel does, times the
    query's: what all keys share does not change their order."""
    import numpy as np

    _, heads, dim = k.shape
    if count % 2 != 0 or count > dim:
        raise _core.InvalidArgumentError(
            f"[calibrate] channels: expected an even number of at most {dim}, got {count}"
        )
    size = (q.astype(np.float64) ** 2).mean((0, 2))
    spread = k.astype(np.float64).var(0)
    pairs = (size * spread).reshape(heads, dim // 2, 2).sum(-1)
    best = np.sort(np.argsort(-pairs, axis=1, kind="stable")[:, : count // 2], axis=1)
    return [int(2 * pair + i) for pair in best.ravel() for i in (0, 1)]

"""A model whose embedding has rows behind its vocabulary: ids that are no tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from effinfer import _core
from effinfer.checkpoints.model_files import ModelFiles
from effinfer.graph import GraphBuilder, Value
from effinfer.techniques.rewrite import prune, rewrite

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_TABLE = "embedding.with_rows.weight"


def with_extra_ids(target: ModelFiles, rows: npt.NDArray[np.float32]) -> ModelFiles:
    """The model whose embedding has these rows behind its own, [n, hidden]."""
    import numpy as np

    name = next(
        target.graph.values[node["inputs"][1]]["weight_name"]
        for node in target.graph.nodes
        if node["op"] == "embedding"
    )
    count, size = target.weights.shape(name)
    dtype, source = target.weights.dtype(name), _core.MemoryWeights()
    source.add(name, np.ascontiguousarray(rows, np.float32), "f32", list(rows.shape))
    exact = dtype == "f32"
    packed = rows if exact else _core.quantize_weight(source, name, dtype)[0]
    own = target.weights.rows(name, range(count)).reshape(-1)
    table = np.concatenate([own, np.ascontiguousarray(packed).view(np.uint8).reshape(-1)])
    weights = _core.LayeredWeights(target.weights)
    weights.add(_TABLE, table, dtype, [count + len(rows), size])

    def look_up(ops: GraphBuilder, node: dict[str, Any], inputs: list[Value]) -> Value | None:
        if node["op"] != "embedding":
            return None
        longer = ops.weight(_TABLE, dtype, [count + len(rows), size])
        return ops.embedding(inputs[0], longer, scale=node["attributes"]["scale"])

    return replace(target, graph=prune(rewrite(target.graph, look_up)), weights=weights)

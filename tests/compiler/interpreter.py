"""A float64 oracle: evaluates a graph of model-definition operators over one whole sequence.

It reads the graph's nodes one by one and does what docs/graph_ops.md says, with numpy and no
regard for speed.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from effinfer import _core

Array = np.ndarray


def rms_norm(x: Array, weight: Array, *, eps: float, groups: int, **_: Any) -> Array:
    rows = x.reshape(len(x), groups, -1)
    scale = 1.0 / np.sqrt((rows**2).mean(axis=-1, keepdims=True) + eps)
    return (rows * scale * weight).reshape(x.shape)


def rope_table(positions: Array, *, dims: int, theta: float, **_: Any) -> Array:
    angles = positions[:, None] * theta ** (-np.arange(0, dims, 2) / dims)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)


def rope(x: Array, table: Array, *, heads: int, interleaved: bool, **_: Any) -> Array:
    half = table.shape[1] // 2
    cos, sin = table[:, None, :half], table[:, None, half:]
    out = x.reshape(len(x), heads, -1).copy()
    first = np.arange(half) * 2 if interleaved else np.arange(half)
    second = first + 1 if interleaved else first + half
    a, b = out[..., first], out[..., second]
    out[..., first], out[..., second] = a * cos - b * sin, a * sin + b * cos
    return out.reshape(x.shape)


def attention(
    q: Array,
    kv: tuple[Array, Array],
    *,
    heads: int,
    kv_heads: int,
    sm_scale: float,
    window_left: int,
    sink_tokens: int,
    logits_soft_cap: float,
    **_: Any,
) -> Array:
    tokens = len(q)
    q = q.reshape(tokens, heads, -1)
    k, v = (np.repeat(x.reshape(tokens, kv_heads, -1), heads // kv_heads, axis=1) for x in kv)
    scores = np.einsum("qhd,khd->hqk", q, k) * sm_scale
    if logits_soft_cap > 0:
        scores = logits_soft_cap * np.tanh(scores / logits_soft_cap)
    distance = np.arange(tokens)[:, None] - np.arange(tokens)[None, :]
    near = (window_left < 0) | (distance <= window_left) | (np.arange(tokens) < sink_tokens)
    visible = (distance >= 0) & near
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v).reshape(tokens, -1)


def gelu(x: Array) -> Array:
    return 0.5 * x * np.vectorize(math.erfc, otypes=[np.float64])(-x / np.sqrt(2))


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


OPS: dict[str, Callable[..., Any]] = {
    "embedding": lambda ids, table, scale: table[ids] * scale,
    "rms_norm": rms_norm,
    "linear": lambda x, w, b=0.0: x @ w.T + b,
    "rope_table": rope_table,
    "rope": rope,
    "kv_append": lambda k, v, **_: (k, v),
    "attention": attention,
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu_squared": lambda x: np.maximum(x, 0) ** 2,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "scale": lambda x, factor: x * factor,
    "softcap": lambda x, cap: cap * np.tanh(x / cap),
    "select_rows": lambda x, rows: x[rows],
}


def evaluate(graph: _core.Graph, weights: Mapping[str, Array], token_ids: list[int]) -> Array:
    """The logits of every token of a sequence, float64 [len(token_ids), vocab].

    `weights` are float64 arrays by their names in the weight source.
    """
    rows = np.arange(len(token_ids))
    values: dict[str, Any] = {
        "token_ids": np.asarray(token_ids),
        "positions": rows,
        "logit_rows": rows,
    }
    for name, facts in graph.values.items():
        if facts["weight_name"]:
            values[name] = weights[facts["weight_name"]]
    for node in graph.nodes:
        inputs = [values[name] for name in node["inputs"]]
        attributes = {k: v for k, v in node["attributes"].items() if k != "as_operand"}
        (output,) = node["outputs"]
        values[output] = OPS[node["op"]](*inputs, **attributes)
    return np.asarray(values[graph.outputs[0]])

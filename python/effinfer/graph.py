"""Building graphs: what model definitions are written in.

A graph is a list of operators over values whose shapes are constants and the step's symbolic sizes:
``"T"`` tokens, ``"S"`` sequences, ``"R"`` rows whose logits are wanted. ``docs/graph_ops.md`` has
the operators; a `GraphBuilder` has a method for each, which checks shapes as it goes and raises
`InvalidArgumentError` naming the operator and the argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from effinfer import _core

Dim = int | str
Attribute = int | float | bool | str | Sequence[int]


@dataclass(frozen=True)
class Value:
    """A value of a graph under construction."""

    id: int
    dtype: str
    shape: tuple[Dim, ...]


class GraphBuilder:
    """Builds one graph; `finish` hands it over."""

    def __init__(self, name: str) -> None:
        self._builder = _core.GraphBuilder(name)

    def _value(self, value_id: int) -> Value:
        facts = self._builder.value(value_id)
        return Value(value_id, facts["dtype"], tuple(facts["shape"]))

    def node(self, op: str, *inputs: Value, **attributes: Any) -> Value:
        """Appends a node of any operator with one result."""
        (value_id,) = self._builder.node(op, [value.id for value in inputs], attributes)
        return self._value(value_id)

    def input(self, name: str, dtype: str, shape: Sequence[Dim]) -> Value:
        """An input of the step: ``token_ids`` and ``positions`` i32[T], ``logit_rows`` i32[R], or
        floats of another name, f32[T, n]."""
        return self._value(self._builder.input(name, dtype, list(shape)))

    def weight(self, name: str, dtype: str, shape: Sequence[int]) -> Value:
        """A weight by its name in the weight source; the same name gives the same value."""
        return self._value(self._builder.weight(name, dtype, list(shape)))

    def rename(self, value: Value, name: str) -> None:
        """Names a node's result: outputs beside the logits are read by their names."""
        self._builder.rename(value.id, name)

    def set_metadata(self, key: str, value: Attribute) -> None:
        """A model fact that the runtime reads, such as ``num_layers``."""
        self._builder.set_metadata(key, value)

    def finish(self, *outputs: Value) -> _core.Graph:
        """Sets the outputs, verifies, and returns the graph."""
        return self._builder.finish([value.id for value in outputs])

    def embedding(self, ids: Value, table: Value, *, scale: float = 1.0) -> Value:
        """Rows of `table` [V, D], of any weight type, times `scale`: i32[X] -> [X, D]."""
        return self.node("embedding", ids, table, scale=float(scale))

    def rms_norm(self, x: Value, weight: Value, *, eps: float, groups: int = 1) -> Value:
        """x / sqrt(mean(x^2) + eps) * weight over each of `groups` equal parts of a row.

        x [X, groups * D], weight [D] (Zhang and Sennrich 2019).
        """
        return self.node("rms_norm", x, weight, eps=float(eps), groups=groups)

    def linear(self, x: Value, weight: Value, bias: Value | None = None) -> Value:
        """x @ weight.T + bias: [X, K], [N, K] of any weight type, [N] -> [X, N]."""
        inputs = [x, weight] if bias is None else [x, weight, bias]
        return self.node("linear", *inputs)

    def ternary_linear(self, x: Value, weight: Value, bias: Value | None = None) -> Value:
        """`linear` as BitNet b1.58 defines it: every row of x is rounded to int8 under one scale,
        max |x| / 127, and the products with the ternary weight are summed as integers, exactly,
        in every phase and precision (Ma et al. 2024, arXiv:2402.17764).
        """
        inputs = [x, weight] if bias is None else [x, weight, bias]
        return self.node("ternary_linear", *inputs)

    def rope_table(
        self,
        positions: Value,
        divisors: Value | None = None,
        *,
        dims: int,
        theta: float,
        scaling: str = "none",
        factor: float = 1.0,
        original_max_position: float = 0.0,
        low_freq_factor: float = 1.0,
        high_freq_factor: float = 4.0,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        attention_factor: float = 0.0,
    ) -> Value:
        """cos and sin of the step's positions, for `rope`: i32[T] -> [T, dims].

        scaling: "none", "linear", "llama3" or "yarn" (Peng et al. 2023; attention_factor 0 means
        0.1 ln(factor) + 1). `divisors` [dims / 2] divide the frequencies.
        """
        inputs = [positions] if divisors is None else [positions, divisors]
        return self.node(
            "rope_table",
            *inputs,
            dims=dims,
            theta=float(theta),
            scaling=scaling,
            factor=float(factor),
            original_max_position=float(original_max_position),
            low_freq_factor=float(low_freq_factor),
            high_freq_factor=float(high_freq_factor),
            beta_fast=float(beta_fast),
            beta_slow=float(beta_slow),
            attention_factor=float(attention_factor),
        )

    def rope(
        self, x: Value, table: Value, *, heads: int, head_dim: int, interleaved: bool = False
    ) -> Value:
        """Rotates the leading dims of each head of x [T, heads * head_dim] (Su et al. 2021).

        Pairs are (i, i + dims / 2), or (2i, 2i + 1) when `interleaved`.
        """
        return self.node("rope", x, table, heads=heads, head_dim=head_dim, interleaved=interleaved)

    def kv_append(self, k: Value, v: Value, *, layer: int, heads: int, head_dim: int) -> Value:
        """Appends K and V [T, heads * head_dim] to the layer's cache; the result orders reads."""
        return self.node("kv_append", k, v, layer=layer, heads=heads, head_dim=head_dim)

    def column_index(self, q: Value, kv: Value, *after: Value, **attributes: Any) -> Value:
        """Which keys blocks of rows visit in prefill, by columns and slashes: a handle for
        `attention`, or for the index of other KV heads, which comes `after` this one.

        attributes: those of `attention` but window_left and logits_soft_cap, and docs/graph_ops.md.
        """
        return self.node("column_index", q, kv, *after, **attributes)

    def block_index(self, q: Value, kv: Value, *after: Value, **attributes: Any) -> Value:
        """A handle as that of `column_index`, by scores of blocks of 64 keys."""
        return self.node("block_index", q, kv, *after, **attributes)

    def bucket_index(self, q: Value, kv: Value, *after: Value, **attributes: Any) -> Value:
        """A handle as that of `column_index`: keys by their hashes, and drawn ones that count for
        the others."""
        return self.node("bucket_index", q, kv, *after, **attributes)

    def page_index(self, q: Value, kv: Value, *after: Value, **attributes: Any) -> Value:
        """Which units of 16, 32 or 64 keys generated tokens visit, by what bounds their logits, or
        pages by means of their keys: such a handle."""
        return self.node("page_index", q, kv, *after, **attributes)

    def key_index(self, q: Value, kv: Value, *after: Value, **attributes: Any) -> Value:
        """Which single keys generated tokens visit, by logits of all channels or of some."""
        return self.node("key_index", q, kv, *after, **attributes)

    def hash_index(self, q: Value, kv: Value, *after: Value, **attributes: Any) -> Value:
        """Which single keys generated tokens draw by their hashes, and how often each counts."""
        return self.node("hash_index", q, kv, *after, **attributes)

    def attention(
        self,
        q: Value,
        kv: Value,
        visits: Value | None = None,
        *,
        layer: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        sm_scale: float,
        window_left: int = -1,
        sink_tokens: int = 0,
        logits_soft_cap: float = 0.0,
    ) -> Value:
        """Causal attention over the layer's cache: [T, heads * head_dim] -> the same.

        A row at position p sees keys in [p - window_left, p]; -1 is all. With a window, the first
        `sink_tokens` keys are seen too. logits_soft_cap c > 0 turns a score s into c * tanh(s / c).
        `visits`: of an index; without a window.
        """
        return self.node(
            "attention",
            *([q, kv] if visits is None else [q, kv, visits]),
            layer=layer,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            sm_scale=float(sm_scale),
            window_left=window_left,
            sink_tokens=sink_tokens,
            logits_soft_cap=float(logits_soft_cap),
        )

    def silu(self, x: Value) -> Value:
        """x * sigmoid(x)."""
        return self.node("silu", x)

    def gelu(self, x: Value) -> Value:
        """x / 2 * (1 + erf(x / sqrt(2))) (Hendrycks and Gimpel 2016)."""
        return self.node("gelu", x)

    def gelu_tanh(self, x: Value) -> Value:
        """GELU in its tanh form (Hendrycks and Gimpel 2016)."""
        return self.node("gelu_tanh", x)

    def relu_squared(self, x: Value) -> Value:
        """max(x, 0)^2."""
        return self.node("relu_squared", x)

    def sigmoid(self, x: Value) -> Value:
        """1 / (1 + e^-x); `mul` with another value is the GLU of Dauphin et al. 2016."""
        return self.node("sigmoid", x)

    def add(self, a: Value, b: Value) -> Value:
        """a + b, of one shape."""
        return self.node("add", a, b)

    def mul(self, a: Value, b: Value) -> Value:
        """a * b, of one shape."""
        return self.node("mul", a, b)

    def scale(self, x: Value, *, factor: float) -> Value:
        """x * factor."""
        return self.node("scale", x, factor=float(factor))

    def softcap(self, x: Value, *, cap: float) -> Value:
        """cap * tanh(x / cap)."""
        return self.node("softcap", x, cap=float(cap))

    def select_rows(self, x: Value, rows: Value) -> Value:
        """The rows whose numbers are given: [T, D], i32[R] -> [R, D]."""
        return self.node("select_rows", x, rows)

"""EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty (Li et al. 2024,
arXiv:2401.15077): one decoder layer predicts the model's next hidden state from those before and
the tokens that were drawn from them; the model's head makes tokens of it.
"""

from dataclasses import dataclass
from typing import ClassVar

from effinfer.graph import Value
from effinfer.techniques.heads import HeadGraph, Heads

HEAD_DIM, WINDOW, THETA, EPS = 64, 63, 10000.0, 1e-5


@dataclass(frozen=True)
class Eagle(Heads):
    """
    The paper's layer sees the prompt's hidden states too; here it has keys of what was generated
    (a prefix from the cache has no hidden states), the last 64 tokens of it, and a narrow MLP. It
    multiplies the model's own output matrix, cut. Trees grow as EAGLE-2's (arXiv:2406.16858) do.
    """

    kind: ClassVar[str] = "eagle"

    def build_head(self, graph: HeadGraph, depth: int) -> Value:
        ops = graph.ops
        read = graph.linear(graph.hidden, "eagle.hidden.weight")
        x = ops.add(read, graph.linear(graph.embedded, "eagle.token.weight"))
        x = ops.add(x, self._attention(graph, self._norm(graph, x, "attn_norm")))
        h = self._norm(graph, x, "ffn_norm")
        gate = ops.silu(graph.linear(h, "eagle.gate.weight"))
        product = ops.mul(gate, graph.linear(h, "eagle.up.weight"))
        return ops.add(x, graph.linear(product, "eagle.down.weight"))

    def _norm(self, graph: HeadGraph, x: Value, name: str) -> Value:
        return graph.ops.rms_norm(x, graph.weight(f"eagle.{name}.weight"), eps=EPS)

    def _attention(self, graph: HeadGraph, x: Value) -> Value:
        ops = graph.ops
        q, k, v = (graph.linear(x, f"eagle.{part}.weight") for part in "qkv")
        heads, kv_heads = int(q.shape[1]) // HEAD_DIM, int(k.shape[1]) // HEAD_DIM
        positions = ops.input("positions", "i32", ["T"])
        table = ops.rope_table(positions, dims=HEAD_DIM, theta=THETA)
        q = ops.rope(q, table, heads=heads, head_dim=HEAD_DIM)
        k = ops.rope(k, table, heads=kv_heads, head_dim=HEAD_DIM)
        kv = ops.kv_append(k, v, layer=0, heads=kv_heads, head_dim=HEAD_DIM)
        out = ops.attention(
            q,
            kv,
            layer=0,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=HEAD_DIM,
            sm_scale=HEAD_DIM**-0.5,
            window_left=WINDOW,
        )
        return graph.linear(out, "eagle.output.weight")

"""Chimera: A Lossless Decoding Method for Accelerating Large Language Models Inference by Fusing
all Tokens (Zeng et al. 2024, arXiv:2402.15758): an encoder of the last three tokens and one of the
whole text, on the model's own hidden states, draft.
"""

from dataclasses import dataclass
from typing import ClassVar

from effinfer.graph import Value
from effinfer.techniques.heads import HeadGraph, Heads

HEAD_DIM, GRAM, THETA, EPS = 64, 3, 10000.0, 1e-5


@dataclass(frozen=True)
class Chimera(Heads):
    """`LLM(target, draft_model=Chimera("chimera.gguf"))`.

    The paper's trigram encoder is an MLP on three embeddings side by side; here it is attention
    that sees three tokens. Its full-context encoder is one attention on states and grams, as here,
    which has keys of what was generated, not of the prompt. In place of a head for each token ahead
    the state that it made takes the place of the model's for the next token, as `Eagle` does.
    """

    kind: ClassVar[str] = "chimera"

    def build_head(self, graph: HeadGraph, depth: int) -> Value:
        ops, token = graph.ops, graph.embedded
        table = ops.rope_table(ops.input("positions", "i32", ["T"]), dims=HEAD_DIM, theta=THETA)
        grams = ops.add(token, self._attention(graph, token, table, "near", GRAM - 1))
        read = graph.linear(graph.hidden, "chimera.hidden.weight")
        x = ops.add(read, graph.linear(grams, "chimera.output.weight"))
        x = ops.add(x, self._attention(graph, x, table, "full", -1))
        h = self._norm(graph, x, "ffn_norm")
        gate = ops.silu(graph.linear(h, "chimera.gate.weight"))
        product = ops.mul(gate, graph.linear(h, "chimera.up.weight"))
        return ops.add(x, graph.linear(product, "chimera.down.weight"))

    def _norm(self, graph: HeadGraph, x: Value, name: str) -> Value:
        return graph.ops.rms_norm(x, graph.weight(f"chimera.{name}.weight"), eps=EPS)

    def _attention(self, graph: HeadGraph, x: Value, table: Value, part: str, window: int) -> Value:
        """window: tokens before its own that a row sees; -1: all."""
        ops, layer = graph.ops, ("near", "full").index(part)
        h = self._norm(graph, x, f"{part}_norm")
        q, k, v = (graph.linear(h, f"chimera.{part}_{name}.weight") for name in "qkv")
        heads, kv_heads = int(q.shape[1]) // HEAD_DIM, int(k.shape[1]) // HEAD_DIM
        q = ops.rope(q, table, heads=heads, head_dim=HEAD_DIM)
        k = ops.rope(k, table, heads=kv_heads, head_dim=HEAD_DIM)
        kv = ops.kv_append(k, v, layer=layer, heads=kv_heads, head_dim=HEAD_DIM)
        out = ops.attention(
            q,
            kv,
            layer=layer,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=HEAD_DIM,
            sm_scale=HEAD_DIM**-0.5,
            window_left=window,
        )
        return graph.linear(out, f"chimera.{part}_out.weight")

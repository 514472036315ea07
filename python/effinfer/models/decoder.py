"""What the definitions of decoder-only models share."""

import math
from dataclasses import asdict

from effinfer import _core
from effinfer.graph import GraphBuilder, Value
from effinfer.models.config import ModelConfig, RopeConfig


class Decoder:
    """The parts of a transformer decoder over one graph. Weights have their GGUF names; a bias is
    used when the file has it."""

    def __init__(self, config: ModelConfig, weights: _core.WeightSource) -> None:
        self.config = config
        self.weights = weights
        self.graph = GraphBuilder(config.architecture)
        self.token_ids = self.graph.input("token_ids", "i32", ["T"])
        self.positions = self.graph.input("positions", "i32", ["T"])
        self.logit_rows = self.graph.input("logit_rows", "i32", ["R"])
        self._rope_tables: dict[RopeConfig, Value] = {}

    def weight(self, name: str) -> Value:
        """A weight of the file; throws InvalidArgumentError when it is missing."""
        return self.graph.weight(name, self.weights.dtype(name), self.weights.shape(name))

    def embed(self, *, scale: float = 1.0) -> Value:
        return self.graph.embedding(self.token_ids, self.weight("token_embd.weight"), scale=scale)

    def norm(self, x: Value, name: str, *, groups: int = 1) -> Value:
        weight = self.weight(f"{name}.weight")
        return self.graph.rms_norm(x, weight, eps=self.config.norm_eps, groups=groups)

    def linear(self, x: Value, name: str) -> Value:
        """A projection, with what some ternary checkpoints have for each: a norm of its input, a
        scale of its output beside the weights."""
        if f"{name}.norm.weight" in self.weights:
            norm = self.weight(f"{name}.norm.weight")
            x = self.graph.rms_norm(x, norm, eps=self.config.linear_norm_eps)
        weight, bias = self.weight(f"{name}.weight"), f"{name}.bias"
        ternary = weight.dtype == "i2_s" or (
            self.config.ternary and weight.dtype in ("tq1_0", "tq2_0")
        )
        build = self.graph.ternary_linear if ternary else self.graph.linear
        out = build(x, weight, self.weight(bias) if bias in self.weights else None)
        factor = self._output_scale(name)
        return out if factor is None else self.graph.scale(out, factor=factor)

    def _output_scale(self, name: str) -> float | None:
        scale = f"{name}.scale"
        if scale not in self.weights:
            return None
        if f"{name}.bias" in self.weights:
            raise _core.UnsupportedError(f"[load] {scale}: expected none beside a bias")
        values = self.weights.dequantize(scale)
        if values.size != 1 or not math.isfinite(values.flat[0]):
            raise _core.FormatError(f"[load] {scale}: expected one finite number")
        return float(values.flat[0])

    def attention(
        self, layer: int, x: Value, *, qk_norm: bool = False, sub_norm: bool = False
    ) -> Value:
        """Grouped-query attention with rotary positions: [T, hidden] -> [T, hidden]. With
        `qk_norm` every head of q and k is normalised before it is rotated, with `sub_norm` what
        attention gives before it is projected."""
        config, graph, block = self.config, self.graph, f"blk.{layer}"
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        q = self.linear(x, f"{block}.attn_q")
        k = self.linear(x, f"{block}.attn_k")
        v = self.linear(x, f"{block}.attn_v")
        if qk_norm:
            q = self.norm(q, f"{block}.attn_q_norm", groups=heads)
            k = self.norm(k, f"{block}.attn_k_norm", groups=kv_heads)
        q = self._rotate(q, layer, heads)
        k = self._rotate(k, layer, kv_heads)
        kv = graph.kv_append(k, v, layer=layer, heads=kv_heads, head_dim=head_dim)
        # A window of w tokens holds the row's own and w - 1 before it.
        sliding = config.sliding_window is not None and config.is_sliding(layer)
        out = graph.attention(
            q,
            kv,
            layer=layer,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            sm_scale=config.attention_scale,
            window_left=(config.sliding_window or 0) - 1 if sliding else -1,
            logits_soft_cap=config.attention_soft_cap,
        )
        if sub_norm:
            out = self.norm(out, f"{block}.attn_sub_norm")
        return self.linear(out, f"{block}.attn_output")

    def gated_mlp(self, layer: int, x: Value, activation: str, *, sub_norm: bool = False) -> Value:
        """down(activation(gate(x)) * up(x)) (Shazeer 2020): [T, hidden] -> [T, hidden]. With
        `sub_norm` the product is normalised first."""
        block = f"blk.{layer}"
        gate = self.graph.node(activation, self.linear(x, f"{block}.ffn_gate"))
        product = self.graph.mul(gate, self.linear(x, f"{block}.ffn_up"))
        if sub_norm:
            product = self.norm(product, f"{block}.ffn_sub_norm")
        return self.linear(product, f"{block}.ffn_down")

    def finish(self, x: Value) -> _core.Graph:
        """Final norm and head over the rows whose logits are wanted, and the model's facts."""
        config, graph = self.config, self.graph
        x = self.norm(graph.select_rows(x, self.logit_rows), "output_norm")
        logits = self.linear(x, "token_embd" if config.tied_head else "output")
        if config.final_soft_cap > 0:
            logits = graph.softcap(logits, cap=config.final_soft_cap)
        for key in ("architecture", "num_layers", "num_kv_heads", "head_dim", "context_length"):
            graph.set_metadata(key, getattr(config, key))
        graph.set_metadata("vocab_size", config.vocab_size)
        graph.set_metadata("eos_token_ids", list(config.eos_token_ids))
        return graph.finish(logits)

    def _rotate(self, x: Value, layer: int, heads: int) -> Value:
        config = self.config
        rope = config.rope
        if config.rope_local is not None and config.is_sliding(layer):
            rope = config.rope_local
        return self.graph.rope(
            x,
            self._rope_table(rope),
            heads=heads,
            head_dim=config.head_dim,
            interleaved=config.rope_interleaved,
        )

    def _rope_table(self, rope: RopeConfig) -> Value:
        if rope not in self._rope_tables:
            # Files of Llama 3.1 and later carry the divisors of the frequencies as a tensor.
            name = "rope_freqs.weight"
            has_divisors = rope is self.config.rope and name in self.weights
            self._rope_tables[rope] = self.graph.rope_table(
                self.positions,
                self.weight(name) if has_divisors else None,
                dims=self.config.rope_dims,
                **asdict(rope),
            )
        return self._rope_tables[rope]


def build_pre_norm(
    config: ModelConfig,
    weights: _core.WeightSource,
    *,
    qk_norm: bool = False,
    sub_norm: bool = False,
) -> _core.Graph:
    """Llama's decoder: a norm before each half of a block, grouped-query attention, a gated MLP;
    with `qk_norm` and `sub_norm` as `Decoder.attention` and `Decoder.gated_mlp` have them."""
    decoder = Decoder(config, weights)
    add = decoder.graph.add
    x = decoder.embed()
    for layer in range(config.num_layers):
        block = f"blk.{layer}"
        h = decoder.norm(x, f"{block}.attn_norm")
        x = add(x, decoder.attention(layer, h, qk_norm=qk_norm, sub_norm=sub_norm))
        h = decoder.norm(x, f"{block}.ffn_norm")
        x = add(x, decoder.gated_mlp(layer, h, config.activation, sub_norm=sub_norm))
    return decoder.finish(x)

"""Decoders in plain float32 torch, over dequantised weights under their GGUF names.

Written from the papers and from the file format, for reading: no cache, no batch, no fusion. The
`gguf` package dequantises, so nothing here shares code with what it checks.
"""

from __future__ import annotations

import math
from pathlib import Path
from unittest.mock import patch

import gguf
import numpy as np
import torch
import torch.nn.functional as F

from tests.reference.config import (
    DecoderConfig,
    RopeConfig,
    config_from_metadata,
    gguf_metadata,
)

Weights = dict[str, torch.Tensor]


def open_gguf(path: str | Path) -> gguf.GGUFReader:
    """The reader slices the file for each token of a vocabulary: a memmap takes three times as long
    as an array."""
    plain = np.memmap
    with patch.object(np, "memmap", lambda path, mode: plain(path, mode=mode).view(np.ndarray)):
        return gguf.GGUFReader(str(path))


def load_gguf(path: str | Path) -> tuple[DecoderConfig, Weights]:
    reader = open_gguf(path)
    weights = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        weights[tensor.name] = torch.from_numpy(values.astype("float32", copy=True))
    return config_from_metadata(gguf_metadata(reader)), weights


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def yarn_frequencies(rope: RopeConfig, base: torch.Tensor) -> torch.Tensor:
    """YaRN (arXiv 2309.00071), section 3.2: by how often a dimension turns in the old context."""

    def dimension_of(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return rope.dims * math.log(turns) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension_of(rope.beta_fast)), 0)
    high = min(math.ceil(dimension_of(rope.beta_slow)), rope.dims - 1)
    index = torch.arange(rope.dims // 2, dtype=torch.float64)
    interpolated = ((index - low) / max(high - low, 1e-3)).clamp(0, 1)
    return base * (1 - interpolated) + base / rope.factor * interpolated


def rope_tables(
    rope: RopeConfig, num_tokens: int, divisors: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, dims / 2]. `divisors` (rope_freqs.weight) carry the llama3 scaling."""
    exponent = torch.arange(0, rope.dims, 2, dtype=torch.float64) / rope.dims
    frequencies = rope.theta**-exponent
    if divisors is not None:
        frequencies = frequencies / divisors.double()
    magnitude = 1.0
    if rope.scaling == "linear":
        frequencies = frequencies / rope.factor
    elif rope.scaling == "yarn":
        frequencies = yarn_frequencies(rope, frequencies)
        magnitude = rope.attention_factor or 0.1 * math.log(rope.factor) + 1.0
    angles = torch.arange(num_tokens, dtype=torch.float64)[:, None] * frequencies
    return (angles.cos() * magnitude).float(), (angles.sin() * magnitude).float()


def rotate(
    x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], rope: RopeConfig
) -> torch.Tensor:
    """x [T, H, D]; RoFormer (arXiv 2104.09864), equation 34."""
    cos, sin = (table[:, None, :] for table in tables)
    turned, rest = x[..., : rope.dims], x[..., rope.dims :]
    if rope.interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
    return torch.cat((turned, rest), -1)


def ternary_linear(x: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """BitNet b1.58 (arXiv 2402.17764, section 2): rows of x become int8 by their largest value."""
    peak = x.abs().amax(-1, keepdim=True)
    rounded = torch.round(x * (127 / peak))
    return F.linear(rounded, values) * (peak / 127 * scale)


ACTIVATIONS = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu_squared": lambda x: F.relu(x).square(),
}


class Decoder:
    """llama (and Mistral), qwen2, qwen3, gemma3 or bitnet. `scales` are those of the ternary
    weights, which are -1, 0 and 1 here."""

    def __init__(
        self, config: DecoderConfig, weights: Weights, scales: dict[str, float] | None = None
    ) -> None:
        self.config = config
        self.weights = weights
        self.scales = scales or {}

    @classmethod
    def from_gguf(cls, path: str | Path) -> Decoder:
        return cls(*load_gguf(path))

    @property
    def is_gemma(self) -> bool:
        return self.config.architecture == "gemma3"

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.weights[f"{name}.weight"]
        if f"{name}.weight" in self.scales:
            return ternary_linear(x, weight, self.scales[f"{name}.weight"])
        return F.linear(x, weight, self.weights.get(f"{name}.bias"))

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self.weights[f"{name}.weight"], self.config.norm_eps)

    def attention(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        config, tokens, block = self.config, x.shape[0], f"blk.{layer}"
        q = self.linear(x, f"{block}.attn_q").view(tokens, config.num_heads, config.head_dim)
        k = self.linear(x, f"{block}.attn_k").view(tokens, config.num_kv_heads, config.head_dim)
        v = self.linear(x, f"{block}.attn_v").view(tokens, config.num_kv_heads, config.head_dim)
        if f"{block}.attn_q_norm.weight" in self.weights:
            q, k = self.norm(q, f"{block}.attn_q_norm"), self.norm(k, f"{block}.attn_k_norm")
        sliding = layer in config.sliding_layers
        rope = config.local_rope if sliding and config.local_rope else config.rope
        divisors = self.weights.get("rope_freqs.weight")
        tables = rope_tables(rope, tokens, divisors)
        q, k = rotate(q, tables, rope), rotate(k, tables, rope)
        group = config.num_heads // config.num_kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k)
        scores = scores * (config.attention_scale or config.head_dim**-0.5)
        if config.attention_soft_cap:
            cap = config.attention_soft_cap
            scores = cap * torch.tanh(scores / cap)
        probabilities = scores.masked_fill(self.unseen(tokens, layer), -math.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", probabilities, v).reshape(tokens, -1)
        if f"{block}.attn_sub_norm.weight" in self.weights:
            mixed = self.norm(mixed, f"{block}.attn_sub_norm")
        return self.linear(mixed, f"{block}.attn_output")

    def unseen(self, tokens: int, layer: int) -> torch.Tensor:
        """bool [tokens, tokens]: the keys that rows do not see."""
        position = torch.arange(tokens)
        distance = position[:, None] - position[None, :]
        hidden = distance < 0
        if layer in self.config.sliding_layers and self.config.sliding_window:
            hidden |= distance >= self.config.sliding_window
        return hidden

    def feed_forward(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        block = f"blk.{layer}"
        gate = ACTIVATIONS[self.config.activation](self.linear(x, f"{block}.ffn_gate"))
        product = gate * self.linear(x, f"{block}.ffn_up")
        if f"{block}.ffn_sub_norm.weight" in self.weights:
            product = self.norm(product, f"{block}.ffn_sub_norm")
        return self.linear(product, f"{block}.ffn_down")

    @torch.inference_mode()
    def hidden(self, token_ids: list[int]) -> torch.Tensor:
        """Normalised hidden states [T, hidden_size] of one sequence from position 0."""
        x = self.weights["token_embd.weight"][torch.tensor(token_ids)]
        if self.is_gemma:
            x = x * math.sqrt(self.config.hidden_size)
        for layer in range(self.config.num_layers):
            block = f"blk.{layer}"
            y = self.attention(self.norm(x, f"{block}.attn_norm"), layer)
            x = x + (self.norm(y, f"{block}.post_attention_norm") if self.is_gemma else y)
            y = self.feed_forward(self.norm(x, f"{block}.ffn_norm"), layer)
            x = x + (self.norm(y, f"{block}.post_ffw_norm") if self.is_gemma else y)
        return self.norm(x, "output_norm")

    @torch.inference_mode()
    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [rows, vocab] of rows of `hidden()`."""
        weight = self.weights.get("output.weight", self.weights["token_embd.weight"])
        logits = F.linear(hidden, weight)
        cap = self.config.logits_soft_cap
        return cap * torch.tanh(logits / cap) if cap else logits

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """float32 [T, vocab]."""
        return self.head(self.hidden(token_ids))

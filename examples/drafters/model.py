"""The byte-level target of examples/pair in torch, for training what drafts for it: its layers one
by one, over rows that see what they are told to see."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as f

from effinfer.checkpoints.model_files import ModelFiles, open_model

PAIR = Path(__file__).parents[1] / "pair"
HEAD_DIM, THETA, EPS = 32, 10000.0, 1e-5
PARTS = (
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output",
    "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
)  # fmt: skip
ATTENTION = PARTS[:5]


class Weights:
    """A GGUF model of the pair as tensors."""

    def __init__(self, path: Path = PAIR / "target.gguf") -> None:
        self.files: ModelFiles = open_model(path)
        self.layers = int(self.files.graph.metadata["num_layers"])
        self.table = self["token_embd"]

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(self.files.weights.dequantize(f"{name}.weight"))

    def layer(self, number: int) -> dict[str, Tensor]:
        return {part: self[f"blk.{number}.{part}"] for part in PARTS}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return f.rms_norm(x, x.shape[-1:], weight, EPS)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Pairs (2i, 2i + 1) of [batch, heads, rows, dims]; positions [rows]."""
    dims = x.shape[-1]
    angles = positions[:, None] * THETA ** (-torch.arange(0, dims, 2) / dims)
    a, b = x[..., ::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)


def keys(x: Tensor, w: Mapping[str, Tensor], positions: Tensor) -> tuple[Tensor, Tensor]:
    """What a layer caches of rows [batch, rows, size]: [batch, kv_heads, rows, HEAD_DIM] both."""
    y = norm(x, w["attn_norm"])
    return rotate(heads(y @ w["attn_k"].T), positions), heads(y @ w["attn_v"].T)


def attend(
    x: Tensor,
    w: Mapping[str, Tensor],
    positions: Tensor,
    mask: Tensor,
    kv: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """What attention adds. mask: bool [rows, keys]; kv: of another layer or stream."""
    q = rotate(heads(norm(x, w["attn_norm"]) @ w["attn_q"].T), positions)
    k, v = kv or keys(x, w, positions)
    out = f.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2).flatten(2) @ w["attn_output"].T


def mlp(x: Tensor, w: Mapping[str, Tensor]) -> Tensor:
    y = norm(x, w["ffn_norm"])
    return (f.silu(y @ w["ffn_gate"].T) * (y @ w["ffn_up"].T)) @ w["ffn_down"].T


def layer(x: Tensor, w: Mapping[str, Tensor], positions: Tensor, mask: Tensor) -> Tensor:
    x = x + attend(x, w, positions, mask)
    return x + mlp(x, w)


class Target:
    """The frozen model."""

    def __init__(self, weights: Weights) -> None:
        self.table, self.norm = weights.table, weights["output_norm"]
        self.layers = [weights.layer(number) for number in range(weights.layers)]

    def run(
        self, x: Tensor, positions: Tensor, mask: Tensor, first: int = 0, last: int | None = None
    ) -> list[Tensor]:
        """The stream before layer `first`, and behind each of the layers up to `last`."""
        states = [x]
        for w in self.layers[first:last]:
            states.append(layer(states[-1], w, positions, mask))
        return states

    def logits(self, x: Tensor) -> Tensor:
        return norm(x, self.norm) @ self.table.T


class Rows:
    """Rows of a text, 0..length-1, and behind each anchor a group of rows that see the text up to
    it and those before them in their group. Groups stand one behind the other."""

    def __init__(self, length: int, anchors: Tensor, size: int, window: int = 1 << 30) -> None:
        """window: keys before a row that it sees."""
        text = torch.arange(length)
        self.anchors, self.size, self.length = anchors, size, length
        self.group = (anchors[:, None] + 1 + torch.arange(size)).flatten()  # their positions
        self.positions = torch.cat([text, self.group])
        number = torch.arange(len(anchors)).repeat_interleave(size)
        group = torch.cat([torch.full((length,), -1), number])
        upto = torch.cat([text, anchors.repeat_interleave(size)])
        is_text = (group == -1)[None] & (self.positions[None] <= upto[:, None])
        same = (group[:, None] >= 0) & (group[:, None] == group[None])
        before = self.positions[None] <= self.positions[:, None]
        near = self.positions[:, None] - self.positions[None] <= window
        self.mask = (is_text | same) & before & near

    def append(self, text: Tensor, group: Tensor) -> Tensor:
        """[batch, length, n] and what each group begins with, [size, n] or [batch, anchors * size,
        n]."""
        if group.ndim == 2:
            group = group.repeat(len(self.anchors), 1).expand(len(text), -1, -1)
        return torch.cat([text, group], 1)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, : self.length], x[:, self.length :]


def loss_of(logits: Tensor, wanted: Tensor) -> Tensor:
    """Cross entropy, wanted: probabilities."""
    return -(wanted * logits.log_softmax(-1)).sum(-1).mean()

"""The heads that train.py trains, as torch modules. They work on hidden states and embeddings that
are scaled to a root mean square of 1; `weights` undoes that.

h and embedded are [batch, WINDOW + DEPTH, size]: what the model had before each token, and the
token's embedding. forward() gives the states of `depths` depths, [batch, WINDOW, size] each.
"""

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional as f

WINDOW, DEPTH = 110, 3
HEAD_DIM, THETA, EPS = 64, 10000.0, 1e-5  # as effinfer.techniques.eagle has them
SEEN = 64  # tokens, as there


def small(rows: int, cols: int, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, cols) * gain / math.sqrt(cols))


class Head(nn.Module):
    kind: str
    rate: float  # of learning
    regression: float = 0.0  # weight of the distance to the model's own later states

    @abstractmethod
    def weights(self, h_scale: float, token_scale: float) -> dict[str, Tensor]:
        """By their names in the file, for states and embeddings that were multiplied by these."""

    def listed(self, scales: dict[str, float]) -> dict[str, Tensor]:
        """The lists of those names: KIND.DEPTH.NAME.weight."""
        return {
            f"{self.kind}.{depth}.{name}.weight": weight * scale
            for name, scale in scales.items()
            for depth, weight in enumerate(getattr(self, name))
        }


class Medusa(Head):
    """state_d = h + up_d silu(down_d h)."""

    kind, rate = "medusa", 2e-3
    ranks = (64, 64, 64)

    def __init__(self, size: int) -> None:
        super().__init__()
        self.down = nn.ParameterList(small(rank, size) for rank in self.ranks)
        self.up = nn.ParameterList(small(size, rank, 0.1) for rank in self.ranks)

    def forward(self, h: Tensor, _: Tensor, depths: int) -> list[Tensor]:
        h = h[:, :WINDOW]
        pairs = list(zip(self.down, self.up, strict=True))[:depths]
        return [h + f.silu(h @ down.T) @ up.T for down, up in pairs]

    def weights(self, h_scale: float, token_scale: float) -> dict[str, Tensor]:
        return self.listed({"down": h_scale, "up": 1 / h_scale})


class Hydra(Head):
    """state_d = state_{d-1} + up_d silu(down_d state_{d-1} + token_d embedding)."""

    kind, rate = "hydra", 2e-3
    ranks = (160, 96, 64)

    def __init__(self, size: int) -> None:
        super().__init__()
        self.down = nn.ParameterList(small(rank, size) for rank in self.ranks)
        self.token = nn.ParameterList(small(rank, size) for rank in self.ranks)
        self.up = nn.ParameterList(small(size, rank, 0.1) for rank in self.ranks)

    def forward(self, h: Tensor, embedded: Tensor, depths: int) -> list[Tensor]:
        state, states = h[:, :WINDOW], []
        parts = list(zip(self.down, self.token, self.up, strict=True))[:depths]
        for d, (down, token, up) in enumerate(parts):
            read = state @ down.T + embedded[:, d : d + WINDOW] @ token.T
            state = state + f.silu(read) @ up.T
            states.append(state)
        return states

    def weights(self, h_scale: float, token_scale: float) -> dict[str, Tensor]:
        return self.listed({"down": h_scale, "token": token_scale, "up": 1 / h_scale})


class Gumiho(Head):
    """Two heads as Hydra's, then heads as Medusa's on the state of the second."""

    kind, rate = "gumiho", 2e-3
    serial, ranks = 2, (160, 96, 32)

    def __init__(self, size: int) -> None:
        super().__init__()
        self.down = nn.ParameterList(small(rank, size) for rank in self.ranks)
        self.token = nn.ParameterList(small(rank, size) for rank in self.ranks[: self.serial])
        self.up = nn.ParameterList(small(size, rank, 0.1) for rank in self.ranks)

    def forward(self, h: Tensor, embedded: Tensor, depths: int) -> list[Tensor]:
        state, states = h[:, :WINDOW], []
        for d, (down, up) in enumerate(list(zip(self.down, self.up, strict=True))[:depths]):
            read = state @ down.T
            if d < self.serial:
                read = read + embedded[:, d : d + WINDOW] @ self.token[d].T
            states.append(state + f.silu(read) @ up.T)
            state = states[-1] if d < self.serial else state
        return states

    def weights(self, h_scale: float, token_scale: float) -> dict[str, Tensor]:
        return self.listed({"down": h_scale, "token": token_scale, "up": 1 / h_scale})


class Eagle(Head):
    """One decoder layer over (h, embedding), its own states as h from the second depth on."""

    kind, rate, regression = "eagle", 2e-3, 0.1
    heads, ffn = 4, 512

    def __init__(self, size: int) -> None:
        super().__init__()
        width = self.heads * HEAD_DIM
        self.hidden = nn.Parameter(torch.eye(size))
        self.token = small(size, size, 0.5)
        self.attn_norm = nn.Parameter(torch.ones(size))
        self.q, self.k, self.v = small(width, size), small(HEAD_DIM, size), small(HEAD_DIM, size)
        self.output = small(size, width, 0.1)
        self.ffn_norm = nn.Parameter(torch.ones(size))
        self.gate, self.up = small(self.ffn, size), small(self.ffn, size)
        self.down = small(size, self.ffn, 0.1)

    def forward(self, h: Tensor, embedded: Tensor, depths: int) -> list[Tensor]:
        state, states = h[:, :WINDOW], []
        memory: list[tuple[Tensor, Tensor]] = []  # keys and values of each depth
        for d in range(depths):
            x = state @ self.hidden.T + embedded[:, d : d + WINDOW] @ self.token.T
            x = x + self.attention(f.rms_norm(x, x.shape[-1:], self.attn_norm, EPS), memory)
            y = f.rms_norm(x, x.shape[-1:], self.ffn_norm, EPS)
            state = x + (f.silu(y @ self.gate.T) * (y @ self.up.T)) @ self.down.T
            states.append(state)
        return states

    def attention(self, x: Tensor, memory: list[tuple[Tensor, Tensor]]) -> Tensor:
        """A guess attends to what was generated, whose keys come from the model's states, and to
        the guesses of its own chain."""
        depth, split = len(memory), (*x.shape[:2], -1, HEAD_DIM)
        q, k, v = ((x @ w.T).view(split).transpose(1, 2) for w in (self.q, self.k, self.v))
        places = torch.arange(WINDOW)
        angles = (places[:, None] + depth) * THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        q, k = rotate(q, angles) * HEAD_DIM**-0.5, rotate(k, angles)
        memory.append((k, v))
        away = places[:, None] - places + depth
        is_seen = (places <= places[:, None]) & (away < SEEN)
        (first_k, first_v), chain = memory[0], memory[1:]
        scores = (q @ first_k.transpose(2, 3)).masked_fill(~is_seen, -math.inf)
        own = [(q * key).sum(-1, keepdim=True) for key, _ in chain]
        shares = torch.cat([scores, *own], -1).softmax(-1)
        out = shares[..., :WINDOW] @ first_v
        for d, (_, value) in enumerate(chain):
            out = out + shares[..., WINDOW + d, None] * value
        return out.transpose(1, 2).flatten(2) @ self.output.T

    def weights(self, h_scale: float, token_scale: float) -> dict[str, Tensor]:
        scales = {"token": token_scale / h_scale, "output": 1 / h_scale, "down": 1 / h_scale}
        return {
            f"eagle.{name}.weight": value * scales.get(name, 1.0)
            for name, value in self.named_parameters()
        }


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Pairs (i, i + HEAD_DIM / 2) of [batch, heads, tokens, HEAD_DIM]."""
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


KINDS = {head.kind: head for head in (Medusa, Hydra, Gumiho, Eagle)}

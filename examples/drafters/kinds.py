"""What drafts for the target, while it is trained: a class for each method of effinfer.techniques.

A drafter's loss is of a batch of texts [batch, LENGTH]; its weights are what its file holds.
"""

import math
from abc import ABC, abstractmethod
from pathlib import Path

import torch
from model import (
    ATTENTION,
    PAIR,
    Rows,
    Target,
    Weights,
    attend,
    keys,
    layer,
    loss_of,
    mlp,
    norm,
)
from torch import Tensor, nn
from torch.nn import functional as f

LENGTH = 112
AHEAD = 3  # tokens that are drafted beside the next one
EVERY = 5  # positions from one group of rows to the next


def small(rows: int, cols: int, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, cols) * gain / math.sqrt(cols))


def copied(w: dict[str, Tensor], parts: tuple[str, ...] = ()) -> nn.ParameterDict:
    """A layer to train, that begins as one of the target's."""
    return nn.ParameterDict({part: w[part].clone() for part in parts or w})


class Drafter(nn.Module, ABC):
    """rate: the highest of the learning rates; count: of the tokens that a step drafts; exit: the
    target's first layer that it does without; like: a model whose metadata its file has."""

    kind = ""
    rate, steps, count, exit = 2e-3, 300, 1, 0
    like: Path | None = None

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target  # no module: it is frozen

    @abstractmethod
    def loss(self, ids: Tensor, random: torch.Generator) -> Tensor:
        """Of a batch of texts [texts, LENGTH]."""

    def weights(self) -> dict[str, Tensor]:
        return {
            f"{self.kind}.{name.split('.', 1)[-1]}.weight": value
            for name, value in self.named_parameters()
        }

    def packed(self, name: str) -> bool:
        """Whether a matrix is a graph's; others are read as numbers."""
        return True

    @torch.no_grad()
    def read(self, ids: Tensor) -> tuple[list[Tensor], Tensor, Rows]:
        """The target's streams, its probabilities behind each token, and the rows of the text."""
        rows = Rows(ids.shape[1], torch.zeros(0, dtype=torch.long), 0)
        x = f.embedding(ids, self.target.table)
        states = self.target.run(x, rows.positions, rows.mask)
        return states, self.target.logits(states[-1]).softmax(-1), rows

    def groups(self, random: torch.Generator, size: int, window: int = 1 << 30) -> Rows:
        first = int(torch.randint(4, 4 + EVERY, (), generator=random))
        return Rows(LENGTH, torch.arange(first, LENGTH - AHEAD - 1, EVERY), size, window)

    def group_loss(self, rows: Rows, logits: Tensor, wanted: Tensor) -> Tensor:
        """logits [batch, anchors * AHEAD, vocab] of rows 1, 2 .. tokens behind each anchor."""
        ahead = rows.anchors[:, None] + 1 + torch.arange(AHEAD)
        return loss_of(logits, wanted[:, ahead.flatten()])


# ---- behind the target's first layers -----------------------------------------------------------


class Exit(Drafter):
    @abstractmethod
    def stream(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """What the head reads, and what the target believes."""

    def loss(self, ids: Tensor, random: torch.Generator) -> Tensor:
        x, wanted = self.stream(ids)
        last = self.own.get("output_norm", self.target.norm)
        return loss_of(norm(x, last) @ self.target.table.T, wanted)


class Kangaroo(Exit):
    kind, exit = "kangaroo", 2

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.adapter = copied(target.layers[-1], ATTENTION)
        self.own = nn.ParameterDict({"output_norm": target.norm.clone()})

    def stream(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        states, wanted, rows = self.read(ids)
        x = states[self.exit]
        return x + attend(x, self.adapter, rows.positions, rows.mask), wanted


class Eesd(Exit):
    kind, exit = "eesd", 1

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.layer = copied(target.layers[-1])
        self.own = nn.ParameterDict({"output_norm": target.norm.clone()})

    def stream(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        states, wanted, rows = self.read(ids)
        return layer(states[self.exit], self.layer, rows.positions, rows.mask), wanted


class M2r2(Exit):
    kind, exit, rank = "m2r2", 2, 32

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        size = len(target.norm)
        self.own = nn.ParameterDict()
        for number in range(self.exit):
            for part in ("attn", "ffn"):
                self.own[f"{number}-{part}_down"] = small(self.rank, size)
                self.own[f"{number}-{part}_up"] = small(size, self.rank, 0.05)

    def weights(self) -> dict[str, Tensor]:
        return {f"m2r2.{name.replace('-', '.')}.weight": w for name, w in self.own.items()}

    def speed(self, x: Tensor, number: int, part: str) -> Tensor:
        down, up = (self.own[f"{number}-{part}_{way}"] for way in ("down", "up"))
        w = self.target.layers[number][f"{part}_norm"]
        return f.silu(norm(x, w) @ down.T) @ up.T

    def stream(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        states, wanted, rows = self.read(ids)
        fast = states[0]
        for number, w in enumerate(self.target.layers[: self.exit]):
            kv = keys(states[number], w, rows.positions)
            added = attend(fast, w, rows.positions, rows.mask, kv)
            fast = fast + added + self.speed(fast, number, "attn")
            fast = fast + mlp(fast, w) + self.speed(fast, number, "ffn")
        return fast, wanted


# ---- several tokens from one step ---------------------------------------------------------------


class Pard(Drafter):
    """The pair's draft model, and a token that says only that some token is there."""

    kind, rate, steps, count = "pard", 1e-3, 500, 1 + AHEAD
    like = PAIR / "draft.gguf"
    MASK = 256

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        draft = Weights(PAIR / "draft.gguf")
        self.table = nn.Parameter(draft.table.clone())
        self.layer = copied(draft.layer(0))
        self.norm = nn.Parameter(draft["output_norm"].clone())

    def weights(self) -> dict[str, Tensor]:
        blocks = {f"blk.0.{part}.weight": w for part, w in self.layer.items()}
        return {"token_embd.weight": self.table, **blocks, "output_norm.weight": self.norm}

    def loss(self, ids: Tensor, random: torch.Generator) -> Tensor:
        _, wanted, _ = self.read(ids)
        rows = self.groups(random, AHEAD)
        x = rows.append(f.embedding(ids, self.table), self.table[self.MASK].expand(AHEAD, -1))
        x = layer(x, self.layer, rows.positions, rows.mask)
        text, group = rows.split(norm(x, self.norm) @ self.table.T)
        return loss_of(text, wanted) + self.group_loss(rows, group, wanted)


class ParallelSpec(Drafter):
    kind, steps, count = "parallel_spec", 400, 1 + AHEAD

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        size = len(target.norm)
        self.own = nn.ParameterDict(
            {
                "hidden": torch.eye(size),
                "token": small(size, size, 0.3).data,
                "masks": torch.randn(AHEAD, size) * 0.5,
                "output_norm": target.norm.clone(),
            }
        )
        self.layer = copied(target.layers[-1])

    def packed(self, name: str) -> bool:
        return "masks" not in name

    def loss(self, ids: Tensor, random: torch.Generator) -> Tensor:
        states, wanted, _ = self.read(ids)
        rows = self.groups(random, AHEAD)
        read = norm(states[-1], self.target.norm).roll(1, 1)  # what came before each token
        token = f.embedding(ids, self.target.table) @ self.own["token"].T
        last = token[:, rows.anchors].repeat_interleave(AHEAD, 1)
        masks = (self.own["masks"] @ self.own["hidden"].T).repeat(len(rows.anchors), 1)
        x = rows.append(read @ self.own["hidden"].T + token, masks + last)
        x = layer(x, self.layer, rows.positions, rows.mask)
        logits = norm(x, self.own["output_norm"]) @ self.target.table.T
        text, group = rows.split(logits)
        return loss_of(text[:, 1:], wanted[:, 1:]) + self.group_loss(rows, group, wanted)


class ExtraRows(Drafter):
    """Rows with trained embeddings behind the text, in the target's own step. The first `before` of
    a group only are seen by the others."""

    rate, steps, count, before = 2e-2, 240, AHEAD, 0

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        near = target.table.mean(0)
        noise = torch.randn(self.before + AHEAD, len(near)) * target.table.std()
        self.own = nn.ParameterDict({"rows": near + 0.5 * noise})

    def packed(self, name: str) -> bool:
        return False

    def wanted(self, ids: Tensor, probabilities: Tensor) -> Tensor:
        return probabilities

    def loss(self, ids: Tensor, random: torch.Generator) -> Tensor:
        _, probabilities, _ = self.read(ids)
        rows = self.groups(random, self.before + AHEAD)
        x = rows.append(f.embedding(ids, self.target.table), self.own["rows"])
        x = self.target.run(x, rows.positions, rows.mask)[-1]
        _, group = rows.split(x)
        group = group.unflatten(1, (-1, rows.size))[:, :, self.before :].flatten(1, 2)
        return self.group_loss(rows, self.target.logits(group), self.wanted(ids, probabilities))


class Pass(ExtraRows):
    """Learns the text's tokens."""

    kind = "pass"

    def wanted(self, ids: Tensor, probabilities: Tensor) -> Tensor:
        return f.one_hot(ids.roll(-1, 1), probabilities.shape[-1]).float()


class Ppd(ExtraRows):
    kind = "ppd"


class Bita(ExtraRows):
    kind, before = "bita", 4


# ---- on the target's states ---------------------------------------------------------------------


class HiddenTransfer(Drafter):
    kind, count, exit = "hidden_transfer", AHEAD, 3

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        size = len(target.norm)
        self.own = nn.ParameterDict(
            {f"{ahead}": torch.eye(size) + 0.02 * torch.randn(size, size) for ahead in range(AHEAD)}
        )

    def packed(self, name: str) -> bool:
        return False

    def loss(self, ids: Tensor, random: torch.Generator) -> Tensor:
        states, wanted, _ = self.read(ids)
        rows = self.groups(random, AHEAD)
        x = states[self.exit]
        pseudo = [x[:, rows.anchors] @ self.own[f"{ahead}"].T for ahead in range(AHEAD)]
        x = rows.append(x, torch.stack(pseudo, 2).flatten(1, 2))
        x = self.target.run(x, rows.positions, rows.mask, self.exit)[-1]
        return self.group_loss(rows, self.target.logits(rows.split(x)[1]), wanted)


class Glide(Drafter):
    """A layer that also attends to the keys of the target's last one. A row has what the target
    cached before its token; rows of guesses have zeros."""

    kind, steps = "glide", 300
    window = 1 << 30

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.layer = copied(target.layers[-1])
        self.cross = copied(target.layers[-1], ("attn_norm", "attn_q", "attn_output"))
        self.own = nn.ParameterDict({"output_norm": target.norm.clone()})

    def weights(self) -> dict[str, Tensor]:
        own = {**self.layer, **self.own, **{f"cross.{p}": w for p, w in self.cross.items()}}
        return {f"{self.kind}.{name}.weight": w for name, w in own.items()}

    def shift(self, random: torch.Generator) -> int:
        return 0

    def loss(self, ids: Tensor, random: torch.Generator) -> Tensor:
        states, wanted, text = self.read(ids)
        rows = self.groups(random, AHEAD)
        near = Rows(LENGTH, rows.anchors, AHEAD, self.window)
        shift = self.shift(random)
        # They are rotated where they lie.
        cached = keys(states[-2], self.target.layers[-1], text.positions + 1 + shift)
        k, v = (torch.cat([c[:, :, :1] * 0, c[:, :, :-1]], 2) for c in cached)
        none = torch.zeros(*k.shape[:2], len(rows.group), k.shape[-1])
        embedded = f.embedding(ids, self.target.table)
        x = rows.append(embedded, embedded[:, rows.group])
        positions = rows.positions + shift
        x = x + attend(x, self.layer, positions, near.mask)
        kv = (torch.cat([k, none], 2), torch.cat([v, none], 2))
        x = x + attend(x, self.cross, positions, rows.mask, kv)
        x = x + mlp(x, self.layer)
        logits = norm(x, self.own["output_norm"]) @ self.target.table.T
        first, group = rows.split(logits)
        return loss_of(first[:, 1:], wanted[:, 1:]) + self.group_loss(rows, group, wanted)


class LongSpec(Glide):
    """The same with a short window of its own keys, at positions far beyond the trained text."""

    kind, window = "long_spec", 15

    def shift(self, random: torch.Generator) -> int:
        return int(torch.randint(0, 384, (), generator=random))


class Chimera(Drafter):
    """An encoder of three tokens, then one of the whole text with the target's states, whose state
    takes the place of the target's for the next token."""

    kind, steps = "chimera", 300
    DEPTH, DIM = 3, 64

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        size = len(target.norm)
        self.own = nn.ParameterDict({"hidden": torch.eye(size), "output": small(size, size, 0.1)})
        for part in ("near", "full"):
            for name, rows in {"q": 2 * self.DIM, "k": self.DIM, "v": self.DIM}.items():
                self.own[f"{part}_{name}"] = small(rows, size)
            self.own[f"{part}_out"] = small(size, 2 * self.DIM, 0.3)
            self.own[f"{part}_norm"] = torch.ones(size)
        self.own["gate"], self.own["up"] = small(2 * size, size), small(2 * size, size)
        self.own["down"], self.own["ffn_norm"] = small(size, 2 * size, 0.1), torch.ones(size)

    def attention(self, x: Tensor, part: str, mask: Tensor) -> Tensor:
        y = norm(x, self.own[f"{part}_norm"])
        split = [(y @ self.own[f"{part}_{name}"].T).unflatten(-1, (-1, self.DIM)) for name in "qkv"]
        q, k, v = (value.transpose(1, 2) for value in split)
        positions = torch.arange(x.shape[1])
        q, k = turn(q, positions), turn(k, positions)
        out = f.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).flatten(2) @ self.own[f"{part}_out"].T

    def step(self, state: Tensor, token: Tensor) -> Tensor:
        """state: before each token, [batch, rows, size]; those behind them."""
        positions = torch.arange(token.shape[1])
        causal = positions[None] <= positions[:, None]
        near = causal & (positions[:, None] - positions[None] <= 2)
        grams = token + self.attention(token, "near", near)
        x = state @ self.own["hidden"].T + grams @ self.own["output"].T
        x = x + self.attention(x, "full", causal)
        y = norm(x, self.own["ffn_norm"])
        product = f.silu(y @ self.own["gate"].T) * (y @ self.own["up"].T)
        return x + product @ self.own["down"].T

    def loss(self, ids: Tensor, random: torch.Generator) -> Tensor:
        states, wanted, _ = self.read(ids)
        hidden = norm(states[-1], self.target.norm)
        token = f.embedding(ids, self.target.table)
        state, count = hidden[:, :-1], LENGTH - self.DEPTH
        total = torch.zeros(())
        for depth in range(self.DEPTH):
            state = self.step(state[:, :count], token[:, 1 + depth : 1 + depth + count])
            behind = wanted[:, 1 + depth : 1 + depth + count]
            total = total + loss_of(state @ self.target.table.T, behind) * 0.8**depth
        return total


def turn(x: Tensor, positions: Tensor) -> Tensor:
    """Pairs (i, i + dims / 2)."""
    dims = x.shape[-1]
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, dims, 2) / dims)
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


ALL: tuple[type[Drafter], ...] = (
    Kangaroo, Pard, ParallelSpec, Eesd, HiddenTransfer, Glide, LongSpec,
    M2r2, Pass, Ppd, Bita, Chimera,
)  # fmt: skip
KINDS = {drafter.kind: drafter for drafter in ALL}

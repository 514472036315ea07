"""Files of heads with random weights, and what they draft, computed by numpy."""

from pathlib import Path

import numpy as np

from effinfer import _core
from effinfer.techniques.eagle import EPS, HEAD_DIM, THETA, WINDOW
from effinfer.techniques.gumiho import SERIAL

RANK, FFN, HEADS, DEPTH = 32, 64, 2, 3
Arrays = dict[str, np.ndarray]


def random_weights(kind: str, size: int, seed: int = 0) -> Arrays:
    """Their size makes a draft depend on all that it should depend on."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, cols: int) -> np.ndarray:
        return (rng.standard_normal((rows, cols)) / np.sqrt(cols)).astype(np.float32)

    weights: Arrays = {}
    if kind == "eagle":
        width = HEADS * HEAD_DIM
        shapes = {
            "hidden": (size, size), "token": (size, size), "q": (width, size),
            "k": (HEAD_DIM, size), "v": (HEAD_DIM, size), "output": (size, width),
            "gate": (FFN, size), "up": (FFN, size), "down": (size, FFN),
        }  # fmt: skip
        weights = {f"eagle.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        for name in ("attn_norm", "ffn_norm"):
            weights[f"eagle.{name}.weight"] = np.ones(size, np.float32)
        return weights
    for depth in range(DEPTH):
        tokens = kind == "hydra" or (kind == "gumiho" and depth < SERIAL)
        for part in ("down", "token") if tokens else ("down",):
            weights[f"{kind}.{depth}.{part}.weight"] = matrix(RANK, size)
        weights[f"{kind}.{depth}.up.weight"] = 2 * matrix(size, RANK)
    return weights


def write_heads(
    path: Path, kind: str, weights: Arrays, size: int, vocab: int, tokens: list[int]
) -> Path:
    writer = _core.GgufWriter(str(path))
    writer.set("general.architecture", "effinfer-heads")
    writer.set("heads.kind", kind)
    writer.set("heads.count", 1 if kind == "eagle" else DEPTH)
    writer.set("heads.hidden_size", size)
    writer.set("heads.vocab_size", vocab)
    writer.set("heads.tokens", np.array(tokens, np.int32))
    for name, array in weights.items():
        writer.add_tensor(name, "f32", list(array.shape))
    for array in weights.values():
        writer.write(array)
    writer.commit()
    return path


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def normed(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS)


class Reference:
    """What heads draft behind a text of which (hidden state, token) pairs are known."""

    def __init__(
        self, kind: str, weights: Arrays, head: np.ndarray, table: np.ndarray, tokens: list[int]
    ) -> None:
        """head: the rows of the tokens that drafts may have."""
        self.kind, self.tokens = kind, tokens
        self.head, self.table = head.astype(np.float64), table.astype(np.float64)
        self.w = {
            name.removeprefix(f"{kind}.").removesuffix(".weight"): w.astype(np.float64)
            for name, w in weights.items()
        }

    def chain(self, hidden: np.ndarray, tokens: list[int], depth: int) -> tuple[list[int], float]:
        """hidden [n, size]: before each of the tokens. The likeliest tokens behind them, as rows of
        the head, and the least distance between the first and the second."""
        states = [h.astype(np.float64) for h in hidden]
        ids, found, margin = list(tokens), [], np.inf
        for d in range(depth):
            state = getattr(self, self.kind)(states, ids, min(d, DEPTH - 1))
            logits = np.sort(self.head @ state)
            margin = min(margin, float(logits[-1] - logits[-2]))
            found.append(int(np.argmax(self.head @ state)))
            parallel = self.kind == "medusa" or (self.kind == "gumiho" and d >= SERIAL)
            states.append(states[-1] if parallel else state)
            ids.append(self.tokens[found[-1]])
        return found, margin

    def medusa(self, states: list[np.ndarray], _: list[int], d: int) -> np.ndarray:
        h = states[-1]
        return h + self.w[f"{d}.up"] @ silu(self.w[f"{d}.down"] @ h)

    def hydra(self, states: list[np.ndarray], ids: list[int], d: int) -> np.ndarray:
        h = states[-1]
        read = self.w[f"{d}.down"] @ h + self.w[f"{d}.token"] @ self.table[ids[-1]]
        return h + self.w[f"{d}.up"] @ silu(read)

    def gumiho(self, states: list[np.ndarray], ids: list[int], d: int) -> np.ndarray:
        return self.hydra(states, ids, d) if d < SERIAL else self.medusa(states, ids, d)

    def eagle(self, states: list[np.ndarray], ids: list[int], _: int) -> np.ndarray:
        x = np.stack(states) @ self.w["hidden"].T + self.table[ids] @ self.w["token"].T
        h = normed(x)
        q, k, v = (h @ self.w[part].T for part in "qkv")
        q = rotated(q.reshape(len(ids), HEADS, HEAD_DIM))[-1]
        k = rotated(k.reshape(len(ids), 1, HEAD_DIM))[:, 0]
        seen = slice(max(0, len(ids) - 1 - WINDOW), None)
        scores = q @ k[seen].T / np.sqrt(HEAD_DIM)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        y = x[-1] + self.w["output"] @ (weights @ v[seen]).reshape(-1)
        n = normed(y)
        return y + self.w["down"] @ (silu(self.w["gate"] @ n) * (self.w["up"] @ n))


def rotated(x: np.ndarray) -> np.ndarray:
    """[tokens, heads, HEAD_DIM], pairs (i, i + HEAD_DIM / 2)."""
    angles = np.arange(len(x))[:, None] * THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    a, b = np.split(x, 2, -1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

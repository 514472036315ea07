"""Trains small models on recall (recall.py), each with the attention of one method.

    python train.py FOLDER
    python train.py FOLDER --kinds mlkv

Llama's architecture, made small. A row names pairs and then asks for all of them, so that it has as
many answers as pairs; when most are found, rows get longer. What a model needs first is a head that
looks at the token before, and that one is there from the beginning: layer 0's first. Needs torch;
takes some minutes a model on one core. FOLDER/KIND.gguf: 8-bit weights.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
from recall import KINDS, LAYERS, VOCAB, WINDOW, draw
from torch import Tensor, nn
from torch.nn import functional as f

from effinfer import _core
from effinfer.techniques import MLKV

sys.path.append(str(Path(__file__).parents[1] / "heads"))
from muon import Muon  # noqa: E402

HIDDEN, FFN, HEADS, HEAD_DIM = 64, 64, 4, 32
THETA, EPS = 100.0, 1e-5
FEWEST, MOST, TOKENS = 8, 48, 4096  # pairs of a row; tokens of a step
PEAK, WARM_STEPS, LAST_STEPS = 1e-2, 50, 120
FOUND = 0.9  # of the answers: rows get longer


def visible(kind: str, layer: int, tokens: int) -> Tensor:
    """bool [tokens, tokens]: which keys a row sees."""
    row, key = torch.arange(tokens)[:, None], torch.arange(tokens)
    sees = key <= row
    if kind == "longgen" and layer != 1:
        return sees & (key > row - WINDOW)
    return sees


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def split(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], HEADS, HEAD_DIM).transpose(1, 2)


def turn(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates pairs (2 i, 2 i + 1) of [..., tokens, HEAD_DIM]."""
    a, b = x[..., ::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


class Layer(nn.Module):
    """Names are those of GGUF files."""

    def __init__(self) -> None:
        super().__init__()
        self.attn_norm, self.ffn_norm = nn.RMSNorm(HIDDEN, eps=EPS), nn.RMSNorm(HIDDEN, eps=EPS)
        self.attn_q, self.attn_k, self.attn_v = (linear(HIDDEN, HEADS * HEAD_DIM) for _ in range(3))
        self.attn_output = linear(HEADS * HEAD_DIM, HIDDEN)
        self.ffn_gate, self.ffn_up = linear(HIDDEN, FFN), linear(HIDDEN, FFN)
        self.ffn_down = linear(FFN, HIDDEN)

    def keys_and_values(self, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        x = self.attn_norm(x)
        return turn(split(self.attn_k(x)), angles), split(self.attn_v(x))

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor, kv: tuple[Tensor, Tensor]) -> Tensor:
        q = turn(split(self.attn_q(self.attn_norm(x))), angles)
        seen = f.scaled_dot_product_attention(q, *kv, attn_mask=mask)
        x = x + self.attn_output(seen.transpose(1, 2).flatten(2))
        normed = self.ffn_norm(x)
        return x + self.ffn_down(f.silu(self.ffn_gate(normed)) * self.ffn_up(normed))


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        method = KINDS[kind].get("layers")
        self.group = method.group if isinstance(method, MLKV) else 1
        self.token_embd = nn.Embedding(VOCAB, HIDDEN)
        self.blk = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.output_norm = nn.RMSNorm(HIDDEN, eps=EPS)
        nn.init.normal_(self.token_embd.weight, std=0.5)
        self.frequencies = THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        self._look_back()

    @torch.no_grad()
    def _look_back(self) -> None:
        """All embeddings share a number, of which layer 0's first head makes queries that are keys
        turned back by one position."""
        first, head = self.blk[0], slice(HEAD_DIM)
        self.token_embd.weight[:, 0] = 2.0
        for projection, positions in ((first.attn_q, -1), (first.attn_k, 0)):
            angles = positions * self.frequencies
            projection.weight[head] = 0.0
            projection.weight[head, 0] = 1.6 * torch.stack([angles.cos(), angles.sin()], -1).ravel()
        first.attn_v.weight[head] *= 2
        first.attn_output.weight[:, head] *= 2

    def forward(self, ids: Tensor, first: int) -> Tensor:
        """Logits of every second token from `first` on."""
        angles = torch.arange(ids.shape[1])[:, None] * self.frequencies
        x = self.token_embd(ids)
        for i, layer in enumerate(self.blk):
            if i % self.group == 0:
                kv = layer.keys_and_values(x, angles)
            x = layer(x, angles, visible(self.kind, i, ids.shape[1]), kv)
        return f.linear(self.output_norm(x[:, first::2]), self.token_embd.weight)


def make_batch(rng: np.random.Generator, pairs: int) -> Tensor:
    """Pairs, and behind them all again in another order: [rows, 4 * pairs]."""
    rows = min(64, TOKENS // (4 * pairs))
    said = draw(rng, rows, pairs)
    order = rng.permuted(np.tile(np.arange(pairs), (rows, 1)), axis=1)[..., None]
    asked = np.take_along_axis(said.reshape(rows, pairs, 2), order, 1)
    return torch.from_numpy(np.concatenate([said, asked.reshape(rows, -1)], 1))


def train(model: Model, steps: int) -> float:
    """The share of answers that are right in the end. At most so many steps: fewer when a model
    finds what the longest rows ask for."""
    loss_of(model, make_batch(np.random.default_rng(1), FEWEST))[0].backward()
    used = [p for p in model.parameters() if p.grad is not None]  # not keys that nobody makes
    matrices = [p for p in used if p.ndim == 2 and p is not model.token_embd.weight]
    others = [p for p in used if p.ndim == 1 or p is model.token_embd.weight]
    optimizers: list[torch.optim.Optimizer] = [
        Muon(matrices, lr=PEAK),
        torch.optim.AdamW(others, lr=PEAK, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    rng = np.random.default_rng(0)
    start, pairs, found = time.perf_counter(), FEWEST, 0.0
    left = steps  # of which the last ones slow down
    for step in range(steps):
        rate = min((step + 1) / WARM_STEPS, 1.0, left / LAST_STEPS)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = PEAK * rate
        loss, right = loss_of(model, make_batch(rng, pairs))
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(used, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        found, left = 0.8 * found + 0.2 * right, left - 1
        if step % 25 == 24:
            seconds = time.perf_counter() - start
            print(f"{step + 1}: {found:.1%} of {pairs} pairs, {seconds:.0f} s", flush=True)
        if left == 0:
            break
        if found > FOUND and pairs < MOST:
            pairs, found = min(MOST, pairs * 3 // 2), 0.0
        elif found > FOUND:
            left = min(left, LAST_STEPS)
    return found


def loss_of(model: Model, ids: Tensor) -> tuple[Tensor, float]:
    """And the share of right answers."""
    first = ids.shape[1] // 2
    logits, wanted = model(ids[:, :-1], first), ids[:, first + 1 :: 2]
    right = (logits.argmax(-1) == wanted).float().mean().item()
    return f.cross_entropy(logits.flatten(0, 1), wanted.flatten()), right


def save(model: Model, path: Path) -> None:
    names = [f"<{'key' if i < VOCAB - 64 else 'value'} {i}>" for i in range(VOCAB)]
    metadata = {
        "general.architecture": "llama",
        "general.name": f"recall, {model.kind}",
        "llama.block_count": LAYERS,
        "llama.context_length": 1024,
        "llama.embedding_length": HIDDEN,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": HEADS,
        "llama.attention.key_length": HEAD_DIM,
        "llama.attention.value_length": HEAD_DIM,
        "llama.attention.layer_norm_rms_epsilon": EPS,
        "llama.rope.dimension_count": HEAD_DIM,
        "llama.rope.freq_base": THETA,
        "llama.vocab_size": VOCAB,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }
    writer, blobs = _core.GgufWriter(str(path)), []
    for key, value in metadata.items():
        writer.set(key, value)
    for name, weight in model.state_dict().items():
        array = np.ascontiguousarray(weight.numpy(), np.float32)
        dtype = "f32" if array.ndim == 1 else "q8_0"
        writer.add_tensor(name, dtype, list(array.shape))
        blobs.append(array if array.ndim == 1 else _core.quantize(dtype, array)[0])
    for blob in blobs:
        writer.write(blob)
    writer.commit()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.folder.mkdir(parents=True, exist_ok=True)
    for kind in options.kinds:
        torch.manual_seed(0)
        model = Model(kind)
        found = train(model, options.steps)
        save(model, options.folder / f"{kind}.gguf")
        print(f"{kind}: {found:.1%} of the answers are right")


if __name__ == "__main__":
    main()

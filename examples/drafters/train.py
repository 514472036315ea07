"""Trains small parts that draft for the byte-level target of examples/pair, which stays as it is.

    python train.py FOLDER                   all kinds
    python train.py FOLDER --kinds kangaroo pard

Each learns the distribution that the target gives to the next tokens of what help() says of Python
(pydoc_data.topics); the last twentieth of the text is held out. FOLDER/KIND.gguf has 8-bit weights.
Needs torch; a kind takes a minute or two on one core.
"""

import argparse
import math
import time
from pathlib import Path
from pydoc_data import topics

import numpy as np
import torch
from kinds import KINDS, LENGTH, Drafter
from model import PAIR, Target, Weights
from torch import Tensor, nn

from effinfer import _core

BATCH = 4


def texts() -> tuple[Tensor, Tensor]:
    """Bytes to learn from, and those held out."""
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    tokenizer = Weights().files.tokenizer()
    ids = torch.tensor(tokenizer.encode(text))
    return ids[: -len(ids) // 20], ids[-len(ids) // 20 :]


def batch(data: Tensor, random: torch.Generator) -> Tensor:
    places = torch.randint(len(data) - LENGTH, (BATCH,), generator=random)
    return data[places[:, None] + torch.arange(LENGTH)]


def train(drafter: Drafter, data: Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(
        drafter.parameters(), lr=drafter.rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    random = torch.Generator().manual_seed(0)
    start, losses = time.perf_counter(), []
    for step in range(steps):
        rate = min((step + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = drafter.rate * rate
        loss = drafter.loss(batch(data, random), random)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 50 == 49:
            seconds = time.perf_counter() - start
            mean = sum(losses[-50:]) / 50
            print(f"{drafter.kind} {step + 1}: loss {mean:.3f}, {seconds:.0f} s", flush=True)


@torch.no_grad()
def held_out(drafter: Drafter, data: Tensor) -> float:
    random = torch.Generator().manual_seed(1)
    return float(np.mean([drafter.loss(batch(data, random), random).item() for _ in range(8)]))


def save(drafter: Drafter, weights: Weights, path: Path) -> None:
    """A model, where it is like one; else a file of parts (effinfer.techniques.trained_parts)."""
    vocab, size = weights.table.shape
    writer = _core.GgufWriter(str(path))
    if drafter.like is not None:
        writer.copy_metadata(_core.GgufFile(str(drafter.like)))
    else:
        writer.set("general.architecture", "effinfer-heads")
        writer.set("heads.kind", drafter.kind)
        writer.set("heads.count", drafter.count)
        writer.set("heads.exit", drafter.exit)
        writer.set("heads.hidden_size", size)
        writer.set("heads.vocab_size", vocab)
        writer.set("heads.tokens", np.arange(vocab, dtype=np.int32))
    blobs = []
    for name, value in drafter.weights().items():
        array = np.ascontiguousarray(value.detach().numpy(), np.float32)
        dtype = "q8_0" if array.ndim == 2 and drafter.packed(name) else "f32"
        source = _core.MemoryWeights()
        source.add(name, array, "f32", list(array.shape))
        blobs.append(array if dtype == "f32" else _core.quantize_weight(source, name, dtype)[0])
        writer.add_tensor(name, dtype, list(array.shape))
    for blob in blobs:
        writer.write(blob)
    writer.commit()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--steps", type=int, default=0, help="0: as many as the kind takes")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.folder.mkdir(parents=True, exist_ok=True)
    weights = Weights(PAIR / "target.gguf")
    data, rest = texts()
    for kind in options.kinds:
        torch.manual_seed(0)
        drafter = KINDS[kind](Target(weights))
        train(drafter, data, options.steps or drafter.steps)
        path = options.folder / f"{kind}.gguf"
        save(drafter, weights, path)
        loss = held_out(drafter, rest)
        print(f"{path}: {path.stat().st_size} bytes; held-out loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    main()

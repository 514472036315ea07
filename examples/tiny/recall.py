"""Recall: pairs of a key and a value, then a key. What was its value?

    python recall.py FOLDER

No text says the answer, so that only attention to the right pair finds it: what a method loses of
keys, it loses of the answers, to the percent.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from effinfer import LLM, SamplingParams
from effinfer.techniques import MLKV, LongGen

KEYS, VALUES = 128, 64  # tokens 0 to 127, and those behind
VOCAB = KEYS + VALUES
PAIRS = 48
LAYERS = 4
WINDOW = 32

# What each model is trained for, as LLM's arguments.
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "mlkv": {"layers": MLKV(2)},
    "longgen": {"layers": LongGen(window=WINDOW)},
}
# LongGen without its layers that see all keys.
WINDOWS: dict[str, Any] = {"layers": LongGen(window=WINDOW, share=0)}


def draw(rng: np.random.Generator, rows: int, pairs: int) -> np.ndarray:
    """i64 [rows, 2 * pairs]: key, value, key, value, ...; a row's keys differ."""
    keys = rng.permuted(np.tile(np.arange(KEYS), (rows, 1)), axis=1)[:, :pairs]
    values = rng.integers(KEYS, VOCAB, keys.shape)
    return np.stack([keys, values], -1).reshape(rows, -1)


def accuracy(llm: LLM, pairs: int = PAIRS, asked: int = 256) -> float:
    """The share of right answers, each at the end of a prompt of its own."""
    rng = np.random.default_rng(1)
    rows = draw(rng, asked, pairs)
    places = rng.integers(0, pairs, asked)
    prompts = [[*row, row[2 * place]] for row, place in zip(rows.tolist(), places, strict=True)]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    answers = np.array([output.token_ids[0] for output in outputs])
    return float((answers == rows[np.arange(asked), 2 * places + 1]).mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="with a file KIND.gguf for each")
    folder = parser.parse_args().folder
    print("| attention | of the method | of the dense model |\n|-|-|-|")
    for name, weights, options in [
        *((kind, kind, options) for kind, options in KINDS.items()),
        ("longgen, windows alone", "longgen", WINDOWS),
    ]:
        cells = [accuracy(LLM(folder / f"{kind}.gguf", **options)) for kind in (weights, "dense")]
        print(f"| {name} | " + " | ".join(f"{100 * cell:.1f} %" for cell in cells) + " |")


if __name__ == "__main__":
    main()

"""Ternary layers of test models: master weights, what they become, and how files hold it."""

from __future__ import annotations

import gguf
import numpy as np

I2_S = 36  # bitnet.cpp's number of the type; the gguf package does not know it


def is_layer(name: str) -> bool:
    """Of a GGUF file's tensors, those of the projections in the blocks."""
    return name.startswith("blk.") and name.endswith(".weight") and "norm" not in name


def master_weights(random: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """A matrix whose mean absolute value is 1 / 16 or 1 / 8, exactly: every form of the file can
    hold that scale. The numbers have eight bits, so that bfloat16 holds them, too."""
    unit = 16 * int(random.integers(1, 3))  # mean in units of 1 / 256
    values = np.rint(random.normal(0, 1.25 * unit, (rows, columns))).clip(-255, 255)
    excess = int(np.abs(values).sum()) - unit * values.size
    flat = values.reshape(-1)
    movable = np.flatnonzero((np.abs(flat) > unit) & (np.abs(flat) < 255))[: abs(excess)]
    flat[movable] -= np.sign(excess) * np.sign(flat[movable])
    assert np.abs(values).mean() == unit
    return (values / 256).astype(np.float32)


def absmean(weights: np.ndarray) -> tuple[np.ndarray, float]:
    """-1, 0 and 1 [N, K] and their scale (arXiv 2402.17764, equations 1 to 3)."""
    mean = float(np.abs(weights.astype(np.float64)).mean())
    return np.clip(np.round(weights / mean), -1, 1).astype(np.int8), mean


def pack_hugging_face(values: np.ndarray) -> np.ndarray:
    """uint8 [N / 4, K]: a byte holds a value of each quarter of the rows."""
    quarters = (values + 1).astype(np.uint8).reshape(4, -1, values.shape[1])
    return quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6


def pack_i2_s(values: np.ndarray, scale: float) -> np.ndarray:
    """Blocks of 128: byte j is w[j] << 6 | w[32 + j] << 4 | w[64 + j] << 2 | w[96 + j]."""
    w = (values + 1).astype(np.uint8).reshape(-1, 4, 32)
    blocks = w[:, 0] << 6 | w[:, 1] << 4 | w[:, 2] << 2 | w[:, 3]
    tail = np.frombuffer(np.float32(scale).tobytes() + bytes(28), np.uint8)
    return np.concatenate([blocks.reshape(-1), tail])


def add_tensor(writer: gguf.GGUFWriter, name: str, master: np.ndarray, dtype: str) -> None:
    values, scale = absmean(master)
    if dtype == "i2_s":
        data = pack_i2_s(values, scale).view(np.int8)
        writer.add_tensor(name, data, raw_shape=master.shape, raw_dtype=I2_S)
        return
    kind = gguf.GGMLQuantizationType[dtype.upper()]
    data = gguf.quants.quantize(values * np.float32(scale), kind)
    writer.add_tensor(name, data, raw_dtype=kind)

"""Checkpoints with random weights and the shapes of real models: for tests and for measuring speed
where the real files are not at hand.

The bytes of a matrix are made without its floats: a bank of quantised normal (or ternary) numbers
is made once for each type and row length, and its blocks are drawn at random. So 2.4 billion
weights take the time of writing the file.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from effinfer import _core
from effinfer.checkpoints.quantization import BLOCKS, FILE_TYPES, TERNARY, file_dtype, fitting_dtype
from effinfer.models.families import family_of
from effinfer.models.gguf_config import config_from_gguf
from effinfer.text.tokenizer_gguf import CONTROL, NORMAL, UNUSED

Bytes = npt.NDArray[np.uint8]

_BANK = 1 << 18  # weights of a bank
_PIECE = 1 << 24  # bytes that are made at a time
_EMBEDDING_SPREAD = 3.0  # of the logits that normalised vectors give


@dataclass(frozen=True)
class Shape:
    """A decoder as GGUF describes it."""

    architecture: str
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int = 4096
    theta: float = 500000.0
    eps: float = 1e-5
    tied: bool = True
    window: int = 0
    type: str = "q8_0"  # of the layers
    head: str = "q8_0"  # of embedding and output


_BITNET = Shape(
    "bitnet-b1.58", 2560, 6912, 30, 20, 5, 128, 128256, type="t2", head="f16"
)  # arXiv:2504.12285
SHAPES = {
    "bitnet-2b4t": _BITNET,
    "bitnet-tiny": replace(_BITNET, hidden=256, ffn=768, layers=2, heads=4, kv_heads=2,
                           head_dim=64, vocab=300, context=512),
    "gemma3-270m": Shape("gemma3", 640, 2048, 18, 4, 1, 256, 262144, 32768, 1e6, 1e-6, window=512),
    "llama3.1-8b": Shape("llama", 4096, 14336, 32, 32, 8, 128, 128256, 8192, tied=False),
    "llama3.2-1b": Shape("llama", 2048, 8192, 16, 32, 8, 64, 128256, 8192),
    "llama-tiny": Shape("llama", 256, 768, 2, 4, 2, 64, 300, 512),
    "qwen2.5-0.5b": Shape("qwen2", 896, 4864, 24, 14, 2, 64, 151936, 32768, 1e6, 1e-6),
    "qwen3-0.6b": Shape("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, 32768, 1e6, 1e-6),
    "smollm2-135m": Shape("llama", 576, 1536, 30, 9, 3, 64, 49152, 8192, 1e5),
}  # fmt: skip


def make_model(name: str, path: str | os.PathLike[str], *, seed: int = 0, **changes: Any) -> Path:
    """Writes a GGUF file with random weights and the shapes of `name`: one of SHAPES.

    changes: other values for fields of Shape, such as layers=2, type="q4_k" or head="q6_k". The
    same arguments give the same bytes. Throws InvalidArgumentError, FileError; FormatError or
    UnsupportedError for sizes and architectures that no reader takes.
    """
    if name not in SHAPES:
        raise _core.InvalidArgumentError(
            f"[make_model] name: expected one of {', '.join(sorted(SHAPES))}, got {name!r}"
        )
    try:
        shape = replace(SHAPES[name], **changes)
    except TypeError as error:
        raise _core.InvalidArgumentError(f"[make_model] changes: {error}") from None
    body, head = (
        file_dtype(f"[make_model] {field}", value)
        for field, value in (("type", shape.type), ("head", shape.head))
    )
    maker = _Maker(np.random.default_rng(seed))
    writer = _core.GgufWriter(str(path))
    metadata = _metadata(shape, name)
    for key, value in {**metadata, **_vocabulary(shape)}.items():
        writer.set(key, value)
    writer.set("general.file_type", FILE_TYPES[body])
    tensors = []
    for tensor, dims in _tensors(metadata, shape):
        outer = tensor in ("token_embd.weight", "output.weight")
        dtype = "f32" if len(dims) == 1 else fitting_dtype(head if outer else body, dims[1])
        tensors.append((dtype, dims, _EMBEDDING_SPREAD if outer else 1.0))
        writer.add_tensor(tensor, dtype, dims)
    for dtype, dims, spread in tensors:
        for piece in maker.pieces(dtype, dims, spread):
            writer.write(piece)
    writer.commit()
    return Path(path)


def _metadata(shape: Shape, name: str) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "block_count": shape.layers,
        "context_length": shape.context,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.ffn,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": shape.eps,
        "rope.dimension_count": shape.head_dim,
        "rope.freq_base": shape.theta,
        "vocab_size": shape.vocab,
    }
    if shape.window:
        keys["attention.sliding_window"] = shape.window
    result = {f"{shape.architecture}.{key}": value for key, value in keys.items()}
    return {"general.architecture": shape.architecture, "general.name": f"random {name}", **result}


def _vocabulary(shape: Shape) -> dict[str, Any]:
    """Every byte is a token, the last two are begin and end, and nothing merges."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    if shape.vocab < len(letters) + 2:
        raise _core.InvalidArgumentError(
            f"[make_model] vocab: expected at least {len(letters) + 2}, got {shape.vocab}"
        )
    fill = [f"[PAD{i}]" for i in range(len(letters), shape.vocab - 2)]
    types = np.full(shape.vocab, UNUSED, np.int32)
    types[: len(letters)], types[-2:] = NORMAL, CONTROL
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*letters, *fill, "<bos>", "<eos>"],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": shape.vocab - 2,
        "tokenizer.ggml.eos_token_id": shape.vocab - 1,
    }


def _tensors(metadata: dict[str, Any], shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    config = config_from_gguf(
        metadata, vocab_size=shape.vocab, tied_head=shape.tied, eos_token_ids=()
    )
    block = family_of(config.architecture).block_weights(config)
    yield "token_embd.weight", (shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        for name, dims in block.items():
            yield f"blk.{layer}.{name}", dims
    yield "output_norm.weight", (shape.hidden,)
    if not shape.tied:
        yield "output.weight", (shape.vocab, shape.hidden)


class _Maker:
    """Random bytes of tensors."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random
        self._banks: dict[tuple[str, int, float], tuple[Bytes, Bytes]] = {}

    def pieces(
        self, dtype: str, dims: tuple[int, ...], spread: float
    ) -> Iterator[npt.NDArray[Any]]:
        """Vectors near 1, as norms are; matrices that keep the size of what they multiply, times
        `spread`."""
        if len(dims) == 1:
            yield self._random.normal(1.0, 0.05, dims).astype(np.float32)
            return
        bank, tail = self._bank(dtype, dims[1], spread)
        left = math.prod(dims) * bank.nbytes // _BANK
        while left > 0:
            blocks = min(-(-left // bank.shape[1]), _PIECE // bank.shape[1])
            piece = bank[self._random.integers(0, len(bank), blocks)].ravel()[:left]
            yield piece
            left -= piece.nbytes
        if tail.size:
            yield tail

    def _bank(self, dtype: str, cols: int, spread: float) -> tuple[Bytes, Bytes]:
        key = (dtype, cols, spread)
        if key not in self._banks:
            scale = spread / math.sqrt(cols)
            if dtype in TERNARY:
                digits = self._random.integers(-1, 2, (1, _BANK)).astype(np.float32)
                values = np.float32(np.float16(scale * math.sqrt(1.5))) * digits
            else:
                values = self._random.standard_normal((1, _BANK), np.float32) * np.float32(scale)
            data, _ = _core.quantize(dtype, values)
            body = data[:-32] if dtype == "i2_s" else data  # whose scale lies behind
            blocks = body.reshape(_BANK // BLOCKS.get(dtype, 32), -1)
            self._banks[key] = blocks, data[body.nbytes :]
        return self._banks[key]

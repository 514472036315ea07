"""Single operators: a matrix product of each weight type, attention, sampling, `effinfer.ops`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rounds import Question, Say, interleave
from sections import Setting
from worker import EngineSpec, Worker

SIDE = 4096
DTYPES = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16", "BF16")
TOKENS = (1, 8, 32, 128)
ATTENTION = {"heads": 20, "kv_heads": 5, "head_dim": 128, "length": 4096}
KV_DTYPES = ("f32", "f16", "i8")  # beside bf16
ROWS = (1, 8, 128)
VOCABULARY = 131_072
BATCHES = (1, 8, 64)
# Logits of that spread; the flat ones keep most of the vocabulary in the nucleus.
FILTERS: dict[str, dict[str, Any]] = {
    "top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95, "spread": 3.0},
    "top-p 0.95": {"top_k": None, "top_p": 0.95, "spread": 3.0},
    "top-p 0.95, flat": {"top_k": None, "top_p": 0.95, "spread": 1e-3},
}
# Of `ops`, in bfloat16 and float32; torch answers those that have contiguous keys.
LIBRARY = {
    "prefill of 1,024": {"case": "prefill", "batch": 1, "rows": 1024, "length": 1024},
    "decode, 8 x 4,096": {"case": "decode", "batch": 8, "rows": 1, "length": 4096},
    "decode, 1 x 32,768": {"case": "decode", "batch": 1, "rows": 1, "length": 32768},
    "decode, 2 x 16,384": {"case": "decode", "batch": 2, "rows": 1, "length": 16384},
    "decode, 16 x 4,096, own pages": {"case": "decode", "batch": 16, "rows": 1, "length": 4096},
    "decode, 16 x 4,096, one prefix": {"case": "cascade", "batch": 16, "rows": 1, "length": 4096},
    "4,096 x 4,096, dense": {"case": "blocks", "share": None, "length": 4096},
    "4,096 x 4,096, all blocks": {"case": "blocks", "share": 1.0, "length": 4096},
    "4,096 x 4,096, 6 of 64 blocks": {"case": "blocks", "share": 6 / 64, "length": 4096},
}
# The largest matrix of BitNet b1.58 2B4T.
TERNARY = {"rows": 6912, "cols": 2560}
TERNARY_TYPES = ("TQ2_0", "TQ1_0")
COLD_COPIES = 60  # in turn: more than any last cache
SECONDS = 0.05  # of calls in one answer, which is their median


def specs_of(setting: Setting, with_plain: bool) -> list[EngineSpec]:
    """llama.cpp twice: weights in its interleaved layouts and as they are in the file."""
    specs = [
        replace(setting.own, script="effinfer_operators.py"),
        EngineSpec("torch", setting.own.python, "torch_operators.py"),
    ]
    for peer in setting.only("llama.cpp")[1:]:
        ggml = replace(peer, script="ggml_operators.py")
        specs.append(replace(ggml, load_options={"repack": True}))
        if with_plain:
            specs.append(replace(ggml, name="llama.cpp, plain", load_options={"repack": False}))
    return specs


def matmul(setting: Setting, say: Say) -> dict[str, Any]:
    """1e9 operations per second, a multiply-add being two; activations are quantised in it."""
    specs = specs_of(setting, with_plain=True)
    exact = replace(specs[0], name="effinfer, int8", load_options={"arithmetic": "int8"})
    specs.insert(1, exact)  # as with deterministic=True, at any n
    folder = setting.log.parent / "weights"
    dtypes = DTYPES[:2] if setting.quick else DTYPES
    ggml = next((spec for spec in specs if spec.script == "ggml_operators.py"), None)
    if ggml is None:
        return {"engines": {"effinfer": {"error": "llama.cpp, which quantises the matrices"}}}
    folder.mkdir(parents=True, exist_ok=True)
    with Worker(ggml, setting.log) as worker:
        worker.ask("load", threads=1, repack=False)
        for dtype in dtypes:
            worker.ask("quantize", dtype=dtype, side=SIDE, path=str(folder / dtype))

    def question(dtype: str, tokens: int) -> Question:
        request = {
            "dtype": dtype,
            "side": SIDE,
            "n": tokens,
            "seconds": SECONDS,
            "path": str(folder / dtype),
        }
        gop = 2e-9 * SIDE * SIDE * tokens
        return Question(f"{dtype}, n={tokens}", "matmul", lambda _: request, gop)

    questions = [question(dtype, tokens) for dtype in dtypes for tokens in TOKENS]
    return {"engines": ask(setting, specs, questions, say)}


def ternary(setting: Setting, say: Say) -> dict[str, Any]:
    """Seconds of a product of a ternary matrix; activations are quantised in it."""
    own, _, *peers = specs_of(setting, with_plain=True)
    plain = [peer for peer in peers if not peer.load_options["repack"]]
    if not plain:
        return {"engines": {"effinfer": {"error": "llama.cpp, which quantises the matrices"}}}
    folder = setting.log.parent / "weights"
    folder.mkdir(parents=True, exist_ok=True)
    with Worker(plain[0], setting.log) as worker:
        worker.ask("load", threads=1, repack=False)
        for dtype in TERNARY_TYPES:
            path = str(folder / f"ternary-{dtype}")
            worker.ask("quantize_ternary", dtype=dtype, path=path, **TERNARY)
    look_up = {"packing": "t2", "method": "lookup"}
    specs = [
        replace(own, name="effinfer, t2", load_options={"packing": "t2"}),
        replace(own, name="effinfer, t1_6", load_options={"packing": "t1_6"}),
        replace(own, name="effinfer, look-up", load_options=look_up),
        replace(
            own,
            name="effinfer, AVX2",
            load_options={"packing": "t2"},
            environment={"EFFINFER_ISA": "avx2"},
        ),
    ]
    specs += [
        replace(plain[0], name=f"llama.cpp, {dtype}", load_options={"ternary": dtype})
        for dtype in TERNARY_TYPES
    ]

    def question(tokens: int, copies: int) -> Question:
        request = {**TERNARY, "n": tokens, "copies": copies, "seconds": 4 * SECONDS}
        request["path"] = str(folder / "ternary-")
        return Question(
            f"n={tokens}{', from memory' if copies > 1 else ''}", "ternary", lambda _: request
        )

    questions = [question(1, 1), question(1, COLD_COPIES), question(8, 1), question(128, 1)]
    return {"engines": ask(setting, specs, questions, say)}


def attention(setting: Setting, say: Say) -> dict[str, Any]:
    """Seconds of a call: the last n positions of a sequence attend to all before them."""

    def question(rows: int) -> Question:
        request = {**ATTENTION, "n": rows, "seconds": SECONDS}
        return Question(f"n={rows}", "attention", lambda _: request)

    questions = [question(rows) for rows in ROWS]
    own, *peers = specs_of(setting, with_plain=False)
    kinds = [
        replace(own, name=f"effinfer, {dtype} KV", load_options={"kv_dtype": dtype})
        for dtype in KV_DTYPES
    ]
    avx2 = replace(own, name="effinfer, AVX2", environment={"EFFINFER_ISA": "avx2"})
    specs = [own, *kinds, avx2, *peers]
    return {"engines": ask(setting, specs, questions, say)}


def sampling(setting: Setting, say: Say) -> dict[str, Any]:
    """Seconds of a call, logits to tokens, on all threads; torch sorts."""

    def question(name: str, batch: int) -> Question:
        request = {**FILTERS[name], "vocab": VOCABULARY, "batch": batch, "seconds": SECONDS}
        return Question(f"{name}, batch {batch}", "sampling", lambda _: request)

    questions = [question(name, batch) for name in FILTERS for batch in BATCHES]
    specs = specs_of(replace(setting, peers=[]), with_plain=False)
    return {"engines": ask(setting, specs, questions, say, threads=setting.threads)}


def library(setting: Setting, say: Say) -> dict[str, Any]:
    """Seconds of a call on all threads: `ops` on pages of 16 tokens, torch on contiguous keys."""

    def question(name: str, dtype: str) -> Question:
        request = {**ATTENTION, **LIBRARY[name], "dtype": dtype, "seconds": SECONDS}
        return Question(f"{name}, {dtype}", "library", lambda _: request)

    questions = [question(name, dtype) for name in LIBRARY for dtype in ("bf16", "f32")]
    specs = specs_of(replace(setting, peers=[]), with_plain=False)
    return {"engines": ask(setting, specs, questions, say, threads=setting.threads)}


def ask(
    setting: Setting, specs: list[EngineSpec], questions: list[Question], say: Say, threads: int = 1
) -> Any:
    load = {"threads": threads}
    return interleave(specs, load, questions, setting.repeats, Path(setting.log), say, settle=0)


SECTIONS = {
    "matmul": matmul,
    "ternary": ternary,
    "attention": attention,
    "sampling": sampling,
    "library": library,
}

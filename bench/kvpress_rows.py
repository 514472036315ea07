"""Methods that drop keys of a prompt beside kvpress, which does it in torch: perplexity of what
follows, in float32 on both sides. A table of bench/techniques.py.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kept_keys import FORCED, SHARE, TOKENS, RandomKeys, Subject, heads_of
from peers import Peer, ensure

from effinfer.techniques import SnapKV, StreamingLLM, Technique

PEER = Peer("kvpress", "kvpress_perplexity.py", ("kvpress==0.5.5", "torch==2.13.0", "gguf"))
BUDGET = round(SHARE * TOKENS)
DROPPED = {"compression_ratio": 1 - SHARE}
HEADER = (
    "| method | here | kvpress | difference |\n"  #
    "|-|-|-|-|"
)


def methods(heads: int) -> dict[str, tuple[tuple[Technique, ...], str, dict[str, Any]]]:
    """Ours, and kvpress's class with its arguments."""
    snap = {**DROPPED, "window_size": 32, "kernel_size": 5}
    return {
        "dense": ((), "", {}),
        "random keys": ((RandomKeys(BUDGET, heads=heads),), "RandomPress", {**DROPPED, "seed": 7}),
        "`SnapKV`": (
            (SnapKV(BUDGET, window=32, pool=5, pooling="avg"),),
            "SnapKVPress",
            snap,
        ),
        "`StreamingLLM`": (
            (StreamingLLM(recent=BUDGET - 4, reposition=False),),
            "StreamingLLMPress",
            {**DROPPED, "n_sink": 4},
        ),
    }


def measure(path: Path, text: Callable[[int], str]) -> list[str]:
    dense = Subject(path, (), TOKENS, precision="f32", kv_dtype="f32")
    tokens = dense.llm.tokenize(text(8 * TOKENS))
    chosen = methods(heads_of(dense.llm))
    request = {
        "model": str(path),
        "prompt": tokens[:TOKENS],
        "follows": tokens[TOKENS:][:FORCED],
        "methods": [[name, arguments] for _, name, arguments in chosen.values()],
    }
    worker = Path(__file__).resolve().parent / "workers" / PEER.worker
    done = subprocess.run(
        [str(ensure(PEER)), str(worker)], input=json.dumps(request), capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"{PEER.name}: {done.stderr[-2000:]}")
    rows: list[str] = []
    theirs = json.loads(done.stdout.splitlines()[-1])
    for (label, (techniques, _, _)), other in zip(chosen.items(), theirs, strict=True):
        subject = Subject(path, techniques, TOKENS, precision="f32", kv_dtype="f32")
        own = subject.perplexity(tokens)
        rows.append(f"| {label} | {own:.3f} | {other:.3f} | {100 * (own / other - 1):+.1f} % |")
        print(rows[-1], flush=True)
    return rows

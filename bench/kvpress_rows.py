"""Methods that drop keys of a prompt beside kvpress, which does it in torch: perplexity of what
follows, in float32 on both sides. A table of bench/techniques.py.

kvpress reads a prompt at once, with all keys, drops once, and keeps what is generated. Methods that
go on dropping are here beside what they have in common with a class of kvpress (`in one chunk`),
and controls drop as it does.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from kept_keys import FORCED, SHARE, TOKENS, Subject, heads_of
from key_methods import CONTROL, RandomKeys, is_wanted
from peers import Peer, ensure

from effinfer import _core
from effinfer.techniques import H2O, KVCompose, Meta, SnapKV, StreamingLLM, Technique, hook
from effinfer.techniques.attention_mass import with_attention_mass

PEER = Peer("kvpress", "kvpress_perplexity.py", ("kvpress==0.5.5", "torch==2.13.0", "gguf"))
BUDGET = round(SHARE * TOKENS)
DROPPED = {"compression_ratio": 1 - SHARE}
# A prompt is one step.
WHOLE = {"max_batch_tokens": 4096}
HEADER = (
    "| method | here | kvpress | difference |\n"  #
    "|-|-|-|-|"
)


@dataclass(frozen=True)
class FirstAndLast(Technique):
    """Of a prompt that was read with all keys the first and the last ones stay."""

    META: ClassVar[Meta] = CONTROL

    budget: int = BUDGET
    first: int = 4

    @hook(when="prompt_end")
    def keep(self, event: Any, sequence: Any) -> None:
        size = sequence.length
        last = range(size - self.budget + self.first, size)
        sequence.retain([[*range(self.first), *last]])


@dataclass(frozen=True)
class MeanAttention(Technique):
    """Of a prompt those keys stay that got most attention from all rows, by the mean over the rows
    that saw a key."""

    META: ClassVar[Meta] = replace(CONTROL, name="mean_attention", needs=("attention",))

    budget: int = BUDGET
    chunk_tokens: int = 4096

    def facts(self) -> dict[str, Any]:
        return {"scores": "prompt", "chunk_tokens": self.chunk_tokens}

    def graph(self, graph: _core.Graph) -> _core.Graph:
        return with_attention_mass(graph, self.name)

    @hook(when="prompt_end")
    def keep(self, event: Any, sequence: Any) -> None:
        sums = sequence.plane(self.name)
        means = sums / np.arange(sequence.length, 0, -1, dtype=np.float32)
        sequence.set_plane(self.name, means)
        sequence.keep_top(self.name, self.budget)


@dataclass(frozen=True)
class Row:
    """Our technique and its engine's options, and kvpress's class with its arguments."""

    techniques: tuple[Technique, ...]
    press: str
    arguments: dict[str, Any]
    engine: dict[str, Any]


def methods(heads: int) -> dict[str, Row]:
    def row(technique: Technique, press: str, engine: Any = None, **more: Any) -> Row:
        return Row((technique,), press, {**DROPPED, **more}, engine or {})

    streaming = StreamingLLM(recent=BUDGET - 4, reposition=False)
    h2o = H2O(BUDGET, recent=BUDGET // 2, chunk_tokens=4096)
    return {
        "dense": Row((), "", {}, {}),
        "random keys": row(RandomKeys(BUDGET, heads=heads), "RandomPress", seed=7),
        "`SnapKV`": row(
            SnapKV(BUDGET, window=32, pool=5, pooling="avg"),
            "SnapKVPress",
            window_size=32,
            kernel_size=5,
        ),
        "first and last keys, dropped once": row(FirstAndLast(), "StreamingLLMPress", n_sink=4),
        "`StreamingLLM`": row(streaming, "StreamingLLMPress", n_sink=4),
        "mean attention, dropped once": row(MeanAttention(), "ObservedAttentionPress", WHOLE),
        "`H2O`, in one chunk": row(h2o, "ObservedAttentionPress", WHOLE),
        "`H2O`": row(H2O(BUDGET, recent=BUDGET // 2), "ObservedAttentionPress"),
        "`KVCompose`": row(KVCompose(BUDGET), "KVComposePress"),
        "`KVCompose`, budgets by layer": row(
            KVCompose(BUDGET, layer_budgets=True), "KVComposePress"
        ),
    }


def measure(path: Path, text: Callable[[int], str], wanted: Collection[str] = ()) -> list[str]:
    """A row for each method, or for those that are wanted."""
    exact = {"precision": "f32", "kv_dtype": "f32"}
    dense = Subject(path, (), TOKENS, **exact)
    tokens = dense.llm.tokenize(text(8 * TOKENS))
    chosen = {
        label: row
        for label, row in methods(heads_of(dense.llm)).items()
        if is_wanted(label, wanted)
    }
    asked = [[row.press, row.arguments] for row in chosen.values()]
    distinct = [each for i, each in enumerate(asked) if each not in asked[:i]]
    request = {
        "model": str(path),
        "prompt": tokens[:TOKENS],
        "follows": tokens[TOKENS:][:FORCED],
        "methods": distinct,
    }
    worker = Path(__file__).resolve().parent / "workers" / PEER.worker
    done = subprocess.run(
        [str(ensure(PEER)), str(worker)], input=json.dumps(request), capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"{PEER.name}: {done.stderr[-2000:]}")
    theirs = json.loads(done.stdout.splitlines()[-1])
    rows: list[str] = []
    for label, row in chosen.items():
        subject = Subject(path, row.techniques, TOKENS, **exact, **row.engine)
        own = subject.perplexity(tokens)
        other = theirs[distinct.index([row.press, row.arguments])]
        rows.append(f"| {label} | {own:.3f} | {other:.3f} | {100 * (own / other - 1):+.1f} % |")
        print(rows[-1], flush=True)
    return rows

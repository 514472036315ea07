"""A text without an end: StreamingLLM keeps 1,024 slots, and what a token takes behind 99,000
tokens is beside what it takes behind 2,000. A table of bench/techniques.py.
"""

from __future__ import annotations

import resource
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kept_keys import TIMED, Subject

import effinfer
from effinfer.techniques import StreamingLLM

NEAR, FAR = 2_000, 99_000  # tokens of a prompt
TURNS = 31
KEPT = 1020  # the last keys, beside the first few
SLOTS = 4096  # that requests may grow to
HEADER = (
    "| behind | time a token | keys and values | memory of the process |\n"  #
    "|-|-|-|-|"
)


def measure(path: Path, text: Callable[[int], str]) -> list[str]:
    """A row for each length. Both engines have answered a prompt of the shorter one before memory
    is looked at."""
    options: dict[str, Any] = {"max_seq_len": SLOTS}
    near, far = (
        Subject(path, (StreamingLLM(recent=KEPT),), length, **options) for length in (NEAR, FAR)
    )
    tokens = near.llm.tokenize(text(1 << 30))
    tokens = (tokens * -(-FAR // len(tokens)))[:FAR]
    for subject in (near, far):
        list(subject.turns(tokens[:NEAR], 1))
    before = resident_bytes()
    pairs = list(zip(near.turns(tokens, TURNS), far.turns(tokens, TURNS), strict=True))
    after = resident_bytes()
    ratio = statistics.median(late[0] / early[0] for early, late in pairs)
    rows = []
    for index, (length, memory) in enumerate(((NEAR, before), (FAR, after))):
        seconds = statistics.median(pair[index][0] for pair in pairs)
        beside = f", {ratio:.2f}x" if index else ""
        pages = pairs[-1][index][1]
        rows.append(
            f"| {length:,} tokens | {1e3 * seconds:.2f} ms{beside} | {pages / 1e6:.1f} MB "
            f"| {memory / 1e6:.0f} MB |"
        )
        print(rows[-1], flush=True)
    return rows


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def where() -> str:
    facts = effinfer.info()
    return (
        f"SmolLM2, `StreamingLLM(recent={KEPT})`; {facts.threads} threads, {facts.isa}; medians of "
        f"{TURNS} turns of {TIMED} tokens, one length after the other."
    )

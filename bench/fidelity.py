"""How far each engine's next-token distributions are from the float32 reference of the tests."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rounds import last_line
from worker import EngineSpec, Worker, WorkerError

ROOT = Path(__file__).resolve().parent.parent
TEXT = ROOT / "tests" / "data" / "essay.txt"
PHASES = ("prefill", "decode")


def measure_fidelity(
    specs: list[EngineSpec],
    model: Path,
    tokenizer: EngineSpec,
    threads: int,
    positions: int,
    scratch: Path,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """A row for each engine and phase: KL divergence, perplexity, agreement of the best token."""
    sys.path.insert(0, str(ROOT))
    from tests.reference.decoder import Decoder
    from tests.reference.metrics import compare

    log = scratch / "fidelity.log"
    context = positions + 64
    with Worker(tokenizer, log) as worker:
        worker.load(model, threads, context)
        tokens = worker.ask("tokenize", text=TEXT.read_text())["tokens"][:positions]
    say("fidelity: reference")
    reference = Decoder.from_gguf(model)
    hidden = reference.hidden(tokens)
    rows = []
    for spec in specs:
        for phase in PHASES:
            say(f"fidelity: {spec.name}, {phase}")
            path = scratch / "logits.npy"
            row: dict[str, Any] = {"engine": spec.name, "phase": phase}
            try:
                with Worker(spec, log) as worker:
                    worker.load(model, threads, context)
                    worker.ask("logits", tokens=tokens, phase=phase, path=str(path))
            except WorkerError as error:
                rows.append({**row, "error": last_line(error)})
                continue
            logits = np.load(path, mmap_mode="r")
            measured = compare(
                lambda part: reference.head(hidden[part]),
                lambda part, logits=logits: np.array(logits[part]),
                tokens,
            )
            rows.append({**row, **dataclasses.asdict(measured)})
            del logits
            path.unlink()
    return rows

"""The section `serving` of docs/performance.md: its tables and its goals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from goal_row import Row
from tables import rate, table

Json = dict[str, Any]

DIRECT, SERVED = "LLM.generate", "effinfer serve"
LEAST_SERVED = {"1": 0.97, "8": 0.93, "64": 0.9}
MOST_FIRST_SECONDS = 0.010
LEAST_CONSTRAINED = {"1": 0.9, "8": 0.85}
LEAST_PEER = 6
PEER_STREAMS = "8"


def text(section: Json) -> str:
    columns = [str(count) for count in section["streams"]]
    header = ["tok/s of streams together", *columns, "first token, ms"]
    rows, notes = [], []
    for name, engine in {**section["engines"], **others(section)}.items():
        cells = (rate(engine.get(key)) for key in columns)
        rows.append([name, *cells, rate(engine.get("first"), scale=1e3)])
        answers = [engine, *(value for value in engine.values() if isinstance(value, dict))]
        notes += [f"{name}: {answer['error']}" for answer in answers if "error" in answer]
    return "\n\n".join([table(header, rows), schema_table(section), *notes])


def others(section: Json) -> Json:
    """The peers, which were asked less."""
    peers = section.get("peers", {})
    return {name: engine for name, engine in peers.items() if name != SERVED}


def schema_table(section: Json) -> str:
    engine = section["schemas"][DIRECT]
    rows = [
        [count, rate(engine.get(f"free {count}")), rate(engine.get(f"schema {count}"))]
        for count in LEAST_CONSTRAINED
    ]
    return table(["requests together, tok/s", "free", "each under another JSON schema"], rows)


def median(engines: Json, name: str, key: str) -> float | None:
    value: float | None = engines.get(name, {}).get(key, {}).get("median")
    return value


def serving_rows(section: Json) -> Iterator[Row]:
    engines = section["engines"]
    for key, least in LEAST_SERVED.items():
        ours, direct = median(engines, SERVED, key), median(engines, DIRECT, key)
        if ours and direct:
            many = "1 stream" if key == "1" else f"{key} streams"
            yield Row(
                f"served: {many}, against LLM.generate", f"{ours:.1f} tok/s",
                f"{direct:.1f} tok/s", ours / direct, least,
            )  # fmt: skip
    ours, direct = median(engines, SERVED, "first"), median(engines, DIRECT, "first")
    if ours and direct:
        yield Row(
            "served: what HTTP adds to the time to the first token",
            f"{1e3 * (ours - direct):.1f} ms", f"{1e3 * MOST_FIRST_SECONDS:.0f} ms",
            (ours - direct) / MOST_FIRST_SECONDS, 1, at_most=True,
        )  # fmt: skip
    yield from constrained_rows(section["schemas"])
    peers = section.get("peers", {})
    ours = median(peers, SERVED, PEER_STREAMS)
    for name in others(section):
        theirs = median(peers, name, PEER_STREAMS)
        if ours and theirs:
            yield Row(
                f"served: {PEER_STREAMS} streams", f"{ours:.1f} tok/s", f"{name} {theirs:.1f}",
                ours / theirs, LEAST_PEER,
            )  # fmt: skip


def constrained_rows(schemas: Json) -> Iterator[Row]:
    for key, least in LEAST_CONSTRAINED.items():
        bound = median(schemas, DIRECT, f"schema {key}")
        free = median(schemas, DIRECT, f"free {key}")
        if bound and free:
            what = "1 request under a" if key == "1" else f"{key} requests, each under another"
            yield Row(
                f"{what} JSON schema, against free text", f"{bound:.1f} tok/s", f"{free:.1f} tok/s",
                bound / free, least,
            )  # fmt: skip

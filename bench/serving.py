"""The section `serving`: the engine behind HTTP against the engine in the caller's process.

The clients are a process of their own; all texts are greedy and of the same length.
"""

from __future__ import annotations

from typing import Any

from rounds import Question, Say
from sections import Setting
from serving_report import DIRECT, SERVED
from worker import EngineSpec

STREAMS = (1, 8, 64)
PEER_STREAMS = 8
CONTEXT = 512
ROWS = (1, 8)
TOPICS = ("the sea", "a clock", "seven horses", "an old map", "snow", "a lost key", "bread", "iron")
KINDS: tuple[dict[str, Any], ...] = (
    {"type": "string"},
    {"type": "integer"},
    {"type": "boolean"},
    {"enum": ["red", "green", "blue"]},
    {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 5},
    {"type": "string", "pattern": "^[A-Z][a-z]{2,12}$"},
    {"anyOf": [{"type": "null"}, {"type": "string", "format": "date"}]},
    {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
)


def prompts(count: int, repeat: int) -> list[str]:
    """Different ones, and new ones each repeat."""
    return [
        f"Story {repeat + 1}.{index}: a long tale about {TOPICS[index % 8]}, told by a sailor.\n\n"
        for index in range(count)
    ]


def schema(index: int) -> dict[str, Any]:
    """One that does not end before the text does; each index is another."""
    kinds = [KINDS[index % 8], KINDS[(index + 3) % 8]]
    item = {
        "type": "object",
        "properties": {f"field_{index}_{place}": kind for place, kind in enumerate(kinds)},
        "required": [f"field_{index}_{place}" for place in range(2)],
        "additionalProperties": False,
    }
    return {"type": "array", "items": item, "minItems": 1000}


def question(streams: int, count: int) -> Question:
    def arguments(repeat: int) -> dict[str, Any]:
        return {"prompts": prompts(streams, repeat), "count": count}

    return Question(str(streams), "streams", arguments, streams * count)


def schema_questions(count: int) -> list[Question]:
    """The same prompts freely and under schemas."""

    def ask(rows: int, is_free: bool) -> Question:
        def arguments(repeat: int) -> dict[str, Any]:
            schemas = None if is_free else [schema(index) for index in range(rows)]
            return {"prompts": prompts(rows, repeat), "count": count, "schemas": schemas}

        name = "free" if is_free else "schema"
        return Question(f"{name} {rows}", "streams", arguments, rows * count)

    return [ask(rows, is_free) for rows in ROWS for is_free in (True, False)]


def serving(setting: Setting, say: Say) -> dict[str, Any]:
    python, count = setting.own.python, setting.decode_tokens
    load = {"model": str(setting.model), "threads": setting.threads, "context": CONTEXT}
    client = "serving_client.py"
    direct = EngineSpec(DIRECT, python, "effinfer_direct.py")
    served = EngineSpec(SERVED, python, client, {}, {"server": "effinfer"})
    first = Question("first", "first", lambda repeat: {"prompts": prompts(1, 100 + repeat)})
    asked = [*(question(streams, count) for streams in STREAMS), first]
    measured: dict[str, Any] = {
        "streams": STREAMS,
        "decode_tokens": count,
        "engines": setting.run([direct, served], load, asked, say),
        "schemas": setting.run([direct], load, schema_questions(setting.decode_tokens), say),
    }
    others = [
        EngineSpec(
            f"{peer.name}'s server",
            python,
            client,
            load_options={"server": "llama", "python": str(peer.python)},
        )
        for peer in setting.only("llama.cpp")[1:]
    ]
    if others:
        eight = [question(PEER_STREAMS, count)]
        measured["peers"] = setting.run([served, *others], load, eight, say)
    return measured


SECTIONS = {"serving": serving}

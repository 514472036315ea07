"""Fifty JSON schemas, each ten harder than the ten before."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

LEVELS, PER_LEVEL = 5, 10


def _object(properties: dict[str, Schema], required: int | None = None) -> Schema:
    """Closed: a hot model would go on with properties of its own."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties)[:required],
        "additionalProperties": False,
    }


def _scalar(random_: random.Random) -> Schema:
    low = random_.randrange(-50, 50)
    enum = random_.sample(["red", "grün", "a b", 3, -1.5, None, True, [1], {"k": []}], 3)
    choices: list[Schema] = [
        {"type": "boolean"},
        {"type": "null"},
        {"enum": enum},
        {"const": random_.choice(['say "hi"\\', "line\n", 7, {"a": [1, {"b": None}]}])},
        {"type": "integer", "minimum": low, "maximum": low + random_.choice([3, 60, 700])},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": random_.choice([1, 25])},
        {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
        {"type": "string", "maxLength": random_.randrange(3, 12)},
        {"type": "string", "minLength": 3, "maxLength": 9},
        {"type": "string", "pattern": random_.choice(["^[a-f0-9]{4,8}$", "^(ab|c+d?){1,3}$"])},
        {"type": "string", "pattern": r"^\+[1-9][0-9]{2,6}(-[0-9]{2})?$"},
        {"type": "string", "format": random_.choice(["date", "ipv4", "uuid", "time"])},
    ]
    return random_.choice(choices)


def _array(items: list[Schema], random_: random.Random) -> Schema:
    if random_.random() < 0.4:
        return {
            "type": "array",
            "prefixItems": items,
            "items": False,
            "minItems": len(items),
        }
    least = random_.randrange(2)
    most = least + random_.randint(1, 2)
    return {"type": "array", "items": items[0], "minItems": least, "maxItems": most}


def _union(parts: list[Schema]) -> Schema:
    """By a tag, as programs tell variants apart."""
    return {
        "anyOf": [
            _object({"kind": {"const": f"k{index}"}, "value": part})
            for index, part in enumerate(parts)
        ]
    }


def _tree(leaf: Schema) -> Schema:
    """A schema that refers to itself."""
    node = _object(
        {
            "value": leaf,
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
        }
    )
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def _shared(part: Schema) -> Schema:
    """Two places that refer to one definition."""
    reference = {"$ref": "#/$defs/part"}
    return {**_object({"first": reference, "second": reference}), "$defs": {"part": part}}


def _of_level(level: int, index: int, random_: random.Random) -> Schema:
    if level == 0:
        return _scalar(random_)
    parts = [_of_level(level - 1, random_.randrange(4), random_)]
    parts += [_scalar(random_) for _ in range(random_.randint(1, 2))]
    names = ["name", "größe", "x-y", "a b", 'q"t']
    kind = index % 4
    if kind == 0:
        return _object(dict(zip(random_.sample(names, 3), parts, strict=False)))
    if kind == 1:
        return _array(parts, random_)
    if kind == 2:
        return _union(parts)
    return _object(dict(zip(names, parts, strict=False)), required=1)


def growing_schemas() -> list[Schema]:
    """References to definitions are at the top only, so that each stands for itself."""
    random_ = random.Random(11)
    found = []
    for level in range(LEVELS):
        found += [_of_level(level, index, random_) for index in range(PER_LEVEL - 2)]
        part = _of_level(max(level - 1, 0), 0, random_)
        found += [_tree(part), _shared(part)]
    return found

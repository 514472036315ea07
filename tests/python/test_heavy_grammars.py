"""Grammars that somebody could send to keep a service busy: compiled or refused, soon and small."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import effinfer
from effinfer import LLM, SamplingParams
from tests.model_files import smollm2_path

MOST_SECONDS = 1.0
MOST_BYTES = 400e6


def _tree(depth: int) -> dict[str, Any]:
    if depth == 0:
        return {"type": "integer"}
    return {"type": "object", "properties": {name: _tree(depth - 1) for name in "ab"}}


def _doubling(depth: int) -> str:
    """A text of 2^depth letters."""
    names = ["start", *(f"r{i}" for i in range(1, depth))]
    rules = [f"{name}: {below} {below}" for name, below in zip(names, names[1:], strict=False)]
    return "\n".join([*rules, f'{names[-1]}: "a"'])


def _chain(length: int, link: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    links = {f"a{i}": link(f"#/$defs/a{i + 1}") for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, f"a{length}": {"type": "integer"}}}


HEAVY: dict[str, dict[str, Any]] = {
    "repeated repeats": {"regex": "((a|bc){1,200}){1,200}"},
    "a long window": {"regex": "[ab]*a[ab]{5000}"},
    "many windows": {"regex": "|".join(f".*{letter}.{{300}}" for letter in "abcdefghij")},
    "a long text": {"regex": "a" * 10**6},
    "parts that may be missing": {"regex": "a?" * 16_000},
    "tokens that may be missing": {"grammar": "start: T\nT: " + '"a"? ' * 16_000},
    "letters": {"regex": r"\w" * 16_000},
    "any letters": {"regex": "." * 10**6},
    "many groups": {"regex": "(" * 5000 + "a" + ")" * 5000},
    "words": {"regex": r"(\w{1,300}\s?){1,300}"},
    "a large enum": {"json_schema": {"enum": [f"value {i}" for i in range(10**5)]}},
    "many properties": {
        "json_schema": {
            "type": "object",
            "properties": {f"name{i}": {"type": "number"} for i in range(20_000)},
        }
    },
    "a deep tree": {"json_schema": _tree(14)},
    "many objects": {
        "json_schema": {
            "anyOf": [
                {"type": "object", "properties": {f"n{i}_{j}": {} for i in range(2000)}}
                for j in range(6)
            ]
        }
    },
    "patterns that all hold": {
        "json_schema": {"allOf": [{"type": "string", "pattern": f".*a{i}.*"} for i in range(40)]}
    },
    "patterns along references": {
        "json_schema": _chain(40, lambda below: {"pattern": "a.*b", "$ref": below})
    },
    "patterns of one property": {
        "json_schema": {"allOf": [{"properties": {"a": {"pattern": f"a{i}."}}} for i in range(40)]}
    },
    "patterns of names": {
        "json_schema": {"patternProperties": {f"^a{i}[b-z]*$": {} for i in range(500)}}
    },
    "a long pattern": {"json_schema": {"type": "string", "pattern": "^" + "(ab|c)?" * 10**5 + "$"}},
    "a chain of rules": {
        "grammar": "\n".join(
            ["start: r0", *(f'r{i}: "x" r{i + 1}' for i in range(30_000)), 'r30000: "x"']
        )
    },
    "a chain of references": {"json_schema": _chain(30_000, lambda below: {"$ref": below})},
    "a chain of objects": {
        "json_schema": _chain(5000, lambda below: {"properties": {"a": {"$ref": below}}})
    },
    "a long array": {
        "json_schema": {"type": "array", "items": {"type": "string"}, "minItems": 10**5}
    },
    "a long string": {"json_schema": {"type": "string", "minLength": 10**5, "maxLength": 10**6}},
    "many alternatives": {
        "json_schema": {
            "anyOf": [{"type": "string", "pattern": f"^x{i}[a-z]*$"} for i in range(5000)]
        }
    },
    "references in a circle": {
        "json_schema": {
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
            "$ref": "#/$defs/a",
        }
    },
    "rules that double": {"grammar": _doubling(40)},
    "many rules": {"grammar": "\n".join(["start: r0", *(f'r{i}: "x{i}"' for i in range(10**5))])},
    "many choices": {"choices": [f"choice {i}" for i in range(10**5)]},
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(smollm2_path(), max_seq_len=256, threads=1) as llm:
        llm.grammars.constraint(SamplingParams(regex="a"), llm.tokenizer)  # the vocabulary is read
        yield llm


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.parametrize("name", HEAVY)
def test_a_heavy_grammar(llm: LLM, name: str):
    """In CPU time: it does not matter who else computes."""
    params = SamplingParams(**HEAVY[name])
    before, begin = peak_bytes(), time.process_time()
    with contextlib.suppress(effinfer.InvalidArgumentError):
        llm.grammars.constraint(params, llm.tokenizer)
    assert time.process_time() - begin < MOST_SECONDS
    assert peak_bytes() - before < MOST_BYTES


# As long as what is above can be made without being refused: the stack has to hold them.
DEEP = {
    "rules": {
        "grammar": "\n".join(
            ["start: r0", *(f'r{i}: {"(" * 25}r{i + 1} "x"{")" * 25}' for i in range(990))]
            + ['r990: "x"']
        )
    },
    "objects": {
        "json_schema": _chain(
            2500, lambda below: {"type": "object", "properties": {"a": {"$ref": below}}}
        )
    },
    "references": {"json_schema": _chain(3900, lambda below: {"$ref": below})},
}


@pytest.mark.parametrize("name", DEEP)
def test_a_deep_grammar(llm: LLM, name: str):
    """Compiled, used and let go of, in threads of the usual stack."""
    params = SamplingParams(**DEEP[name], max_tokens=4)
    with ThreadPoolExecutor(1) as pool:
        (output,) = pool.submit(llm.generate, "x", params).result()
        assert output.error == "" and output.token_ids
        pool.submit(llm.grammars._kept.clear).result()


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"type": "string", "pattern": "^a"}, {"minLength": 2}]},
        {"$ref": "#/$defs/x/1", "$defs": {"x": [{}, {"const": "ab"}], "y": {"$ref": "#/$defs/y"}}},
        {"type": "object", "properties": {f"p{i}": {"pattern": "^a+$"} for i in range(50)}},
        {
            "anyOf": [
                {"type": "string", "pattern": f"^{letter}{letter}$"} for letter in "abcdefgh" * 9
            ]
        },
    ],
    ids=str,
)
def test_what_is_not_too_much(llm: LLM, schema: dict[str, Any]):
    assert llm.grammars.constraint(SamplingParams(json_schema=schema), llm.tokenizer) is not None


def test_choices_are_texts(llm: LLM):
    """Whatever they would mean in a grammar."""
    choices = ["a", "ab", "a.*(b)|[c]{2}", "^$ #&-~\\ +?", "x\ny", 'say "no"', "\u00fc \U0001f600"]
    for choice in choices:
        constraint = llm.grammars.constraint(SamplingParams(choices=choices), llm.tokenizer)
        assert constraint is not None
        assert all(constraint.accept(token) for token in llm.tokenize(choice, add_special=False))
        assert constraint.ended() or constraint.accept(llm.tokenizer.eos_token_id)
    constraint = llm.grammars.constraint(SamplingParams(choices=choices), llm.tokenizer)
    ids = llm.tokenize("abb", add_special=False)
    assert constraint is not None and not all(constraint.accept(token) for token in ids)

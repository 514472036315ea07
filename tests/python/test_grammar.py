"""Texts that a schema, a regular expression, a grammar or a list of choices allows."""

import json
import re
import threading
import time

import jsonschema
import pytest

import effinfer
from effinfer import LLM, SamplingParams
from tests.model_files import smollm2_path

PROMPT = "The answer: "


def _object(**properties):
    """Closed: a hot model would go on with properties of its own."""
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(properties),
        "additionalProperties": False,
    }


_PERSON = _object(
    name={"type": "string", "maxLength": 12},
    age={"type": "integer", "minimum": 0, "maximum": 130},
    married={"type": "boolean"},
)
SCHEMAS = {
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "integer": {"type": "integer", "minimum": -5, "maximum": 17},
    "number": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "string": {"type": "string", "minLength": 2, "maxLength": 9},
    "pattern": {"type": "string", "pattern": "^[a-f0-9]{4,8}$"},
    "date": {"type": "string", "format": "date"},
    "enum": {"enum": ["red", "green", 3, None]},
    "const": {"const": {"a": [1, 2]}},
    "any of": {"anyOf": [{"type": "integer", "maximum": 9, "minimum": 0}, {"type": "null"}]},
    "array": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 4},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"enum": ["x"]}],
        "items": False,
        "minItems": 2,
    },
    "object": _PERSON,
    "open": {**_object(a={"enum": [1]}), "additionalProperties": True},
    "nested": _object(inner=_object(deep=_object(leaf={"enum": ["l"]}))),
    "list of objects": {"type": "array", "items": _PERSON, "minItems": 1, "maxItems": 2},
    "references": {
        "$defs": {"node": _object(value={"enum": [1]}, left={"enum": [None]})},
        "$ref": "#/$defs/node",
    },
    "escapes": {"enum": ['a "quoted" \\ text', "línea\n"]},
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(smollm2_path(), max_seq_len=512)


@pytest.mark.parametrize("seed", [1, 2])
def test_every_finished_text_obeys_its_schema(llm, seed):
    """Hot, and all in one batch."""
    params = [
        SamplingParams(json_schema=schema, temperature=1.5, seed=seed, max_tokens=120)
        for schema in SCHEMAS.values()
    ]
    outputs = llm.generate([PROMPT] * len(params), params)
    finished = 0
    for (name, schema), output in zip(SCHEMAS.items(), outputs, strict=True):
        assert output.error == "", name
        assert output.finish_reason in ("stop", "length"), name
        if output.finish_reason == "stop":
            jsonschema.validate(json.loads(output.text), schema)
            finished += 1
    assert finished >= len(SCHEMAS) - 2  # open objects and digits may go on


def test_constrained_texts_do_not_depend_on_the_batch(llm):
    params = [
        SamplingParams(json_schema=_PERSON, temperature=1.0, seed=7, max_tokens=60),
        SamplingParams(temperature=1.0, seed=8, max_tokens=60),
        SamplingParams(regex="[a-z ]{30,40}", temperature=0.0, max_tokens=60),
    ]
    together = llm.generate([PROMPT] * 3, params)
    alone = [llm.generate(PROMPT, p)[0] for p in params]
    assert [o.token_ids for o in together] == [o.token_ids for o in alone]


def test_drafts_change_no_constrained_text(llm):
    drafting = LLM(smollm2_path(), max_seq_len=512, speculation="suffix")
    schema = {"type": "array", "items": _PERSON, "minItems": 4, "maxItems": 4}
    params = SamplingParams(json_schema=schema, temperature=0.0, max_tokens=200)
    plain = llm.generate(PROMPT, params)[0]
    drafted = drafting.generate(PROMPT, params)[0]
    assert drafted.token_ids == plain.token_ids
    assert drafted.metrics.speculation.accepted > 0


def test_regex_grammar_choices(llm):
    def text(**fields):
        output = llm.generate(PROMPT, SamplingParams(temperature=1.5, max_tokens=40, **fields))[0]
        assert (output.finish_reason, output.error) == ("stop", "")
        return output.text

    assert re.fullmatch(r"\d{4}-\d\d-\d\d", text(regex=r"\d{4}-\d\d-\d\d"))
    assert text(choices=["yes", 'no, "never"']) in ("yes", 'no, "never"')
    assert re.fullmatch("a[bc]{1,3}d", text(grammar='start: "a" ("b" | "c"){1,3} "d"'))


def test_a_stream_obeys_too(llm):
    params = SamplingParams(regex="(one|two) (three|four)", temperature=1.5)
    assert "".join(llm.stream(PROMPT, params)) in (
        "one three", "one four", "two three", "two four",
    )  # fmt: skip


def test_too_few_tokens_say_length(llm):
    output = llm.generate(PROMPT, SamplingParams(regex="[a-z]{200}", max_tokens=5))[0]
    assert output.finish_reason == "length"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"regex": "("}, "regex: .*unclosed"),
        ({"regex": 3}, "regex: expected a text"),
        ({"json_schema": {"type": "objekt"}}, "json_schema: .*objekt"),
        ({"json_schema": "{"}, "json_schema: "),
        ({"grammar": "start: x"}, "grammar: .*unknown name"),
        ({"choices": []}, "choices: expected a list"),
        ({"choices": "yes"}, "choices: expected a list"),
        ({"choices": ["a"], "regex": "a"}, "expected None beside"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_before_anything_runs(llm, fields, message):
    started = time.perf_counter()
    with pytest.raises(effinfer.InvalidArgumentError, match=message):
        llm.generate([PROMPT, PROMPT], [SamplingParams(), SamplingParams(**fields)])
    assert time.perf_counter() - started < 5
    assert llm.engine.stats()["running"] == 0


def test_threads_share_what_was_compiled(llm):
    params = SamplingParams(json_schema=_PERSON, temperature=0.0, max_tokens=60)
    texts = []
    threads = [
        threading.Thread(target=lambda: texts.append(llm.generate(PROMPT, params)[0].text))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 4
    assert len(set(texts)) == 1


def test_what_was_compiled_last_is_kept(llm, monkeypatch):
    compiled = []
    compiler = llm.grammars
    compile_ = compiler._compile
    monkeypatch.setattr(
        compiler, "_compile", lambda *given: compiled.append(given) or compile_(*given)
    )

    def ask(count):
        compiler.constraint(SamplingParams(regex=f"kept{{{count}}}"), llm.tokenizer)

    for count in (1, 1, 2, 1):
        ask(count)
    assert len(compiled) == 2
    for count in range(3, 3 + 64):  # as many as are kept
        ask(count)
    assert len(compiled) == 66
    ask(66)
    assert len(compiled) == 66
    ask(1)
    assert len(compiled) == 67


class _Evens:
    """A constraint of one's own, for the engine."""

    def fill(self, mask):
        mask[:] = 0x55555555

    def accept(self, token):
        return token % 2 == 0

    def rollback(self, count):
        pass

    def ended(self):
        return False


def test_a_constraint_of_ones_own(llm):
    prompt = llm.tokenize(PROMPT)
    core = SamplingParams(max_tokens=8, ignore_eos=True).to_core()

    def run(constraint):
        request = llm.engine.add(prompt, core, constraint)
        outputs = []
        while llm.engine.has_work():
            outputs += llm.engine.step_many()
        llm.engine.forget(request)
        return [t for o in outputs for t in o.token_ids], outputs[-1].error

    tokens, error = run(_Evens())
    assert len(tokens) == 8
    assert error == ""
    assert all(token % 2 == 0 for token in tokens)

    class Broken(_Evens):
        def fill(self, mask):
            raise ValueError("no more")

    assert "no more" in run(Broken())[1]
    with pytest.raises(effinfer.InvalidArgumentError, match="without fill"):
        llm.engine.add(prompt, core, object())

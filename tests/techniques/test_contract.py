"""What every technique promises, on a model of two layers: each one of the registry that changes a
model's graph or engine is asked for the same.

    1  at its dense_limit: the bits of plain decoding
    2  the same text alone, among others, for two sizes of steps, on 1 and 2 threads, preempted
    4  nothing is left behind: pages, integrity
    5  cancelled at any step, and with several answers
    6  wrong values are refused by name
    7  a plain request beside it keeps its bits
    8  explain(), JSON, and an artifact that needs no Python
    9  Python is not called in a step
   10  under 100 lines
"""

import inspect
import json
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

import effinfer
from effinfer import LLM, _core
from effinfer.checkpoints.model_files import GRAPH_KEY, open_model
from effinfer.techniques import REGISTRY, Technique
from effinfer.techniques.ranges import Range
from effinfer.techniques.target_extension import TargetExtension
from tests.techniques.contract_cases import CASES
from tests.techniques.contract_model import CHUNK, asks, long_model, texts


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return long_model(tmp_path_factory)


def load(path: Any, technique: Technique | None, **options: Any) -> LLM:
    settings: dict[str, Any] = {"threads": 1, "max_batch_tokens": CHUNK, **options}
    return LLM(path, techniques=[] if technique is None else [technique], **settings)


@pytest.fixture(scope="module", params=CASES, ids=str)
def technique(request):
    return CASES[request.param]


@pytest.fixture(scope="module")
def plain(path):
    return texts(load(path, None, prefix_cache=False), asks())


@pytest.fixture(scope="module")
def alone(path, technique):
    """Of each request in an engine of its own."""
    llm = load(path, technique, prefix_cache=False)
    return [texts(llm, [ask])[0] for ask in asks()]


def test_it_has_a_case():
    assert set(CASES) >= {n for n, kind in REGISTRY.items() if issubclass(kind, Technique)}


def test_it_does_something(alone, plain):
    assert alone != plain


def test_1_at_its_dense_limit_it_has_the_bits_of_plain_decoding(path, technique, plain):
    meta = technique.META
    if meta.effect == "lossless":
        assert texts(load(path, technique), asks()) == plain
    elif meta.dense_limit is not None:
        dense = load(path, replace(technique, **meta.dense_limit))
        assert texts(dense, asks()) == plain
        prompt = asks()[0][0]
        expected = load(path, None).logits(prompt)
        np.testing.assert_array_equal(dense.logits(prompt), expected)


OPTIONS: dict[str, dict[str, Any]] = {
    "others": {"prefix_cache": False},
    "prefixes": {},
    "larger steps": {"max_batch_tokens": 300},
    "2 threads": {"threads": 2},
    "few": {"max_sequences": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_2_a_text_depends_on_its_request_alone(path, technique, alone, name):
    llm = load(path, technique, **OPTIONS[name])
    assert texts(llm, asks()) == alone
    assert texts(llm, asks()) == alone  # now with what is cached


def test_2_a_preempted_text_is_the_same(path, technique):
    """Prompts end a few tokens before a page does, so that they take one more, whatever is kept."""
    rng = np.random.default_rng(9)
    sizes = (120, 185, 60, 250, 190)
    longer = [
        (rng.integers(0, 200, size).tolist(), replace(params, max_tokens=90))
        for size, (_, params) in zip(sizes, asks(5), strict=True)
    ]
    expected = texts(load(path, technique, prefix_cache=False), longer)
    llm = load(path, technique, num_pages=7, max_seq_len=448)
    assert texts(llm, longer) == expected
    assert llm.engine.stats()["preemptions"] > 0


@pytest.mark.parametrize("precision", ["f32", "deterministic"])
def test_2_with_one_arithmetic(path, technique, precision):
    mode: dict[str, Any] = {precision: True} if precision == "deterministic" else {}
    mode = mode or {"precision": precision}
    llm = load(path, technique, prefix_cache=False, **mode)
    expected = [texts(llm, [ask])[0] for ask in asks(4)]
    assert texts(load(path, technique, max_batch_tokens=300, **mode), asks(4)) == expected


def test_2_scored_prompts_beside_others(path, technique, alone):
    requests = asks()
    scored = (requests[0][0], replace(requests[0][1], prompt_logprobs=0))
    llm = load(path, technique)
    expected = llm.generate([scored[0]], scored[1])[0]
    together = llm.generate(
        [scored[0], *(prompt for prompt, _ in requests[1:])],
        [scored[1], *(params for _, params in requests[1:])],
    )
    assert together[0].prompt_logprobs == expected.prompt_logprobs
    assert [output.token_ids for output in together[1:]] == alone[1:]


def test_2_several_answers_are_those_that_each_would_be_alone(path, technique):
    prompt, params = asks()[2]
    params = replace(params, temperature=0.8, n=3, seed=5)
    together = load(path, technique).generate([prompt], params)[0]
    for index, output in enumerate([together, *together.others]):
        one = load(path, technique, prefix_cache=False)
        expected = one.generate([prompt], replace(params, n=1, seed=5 + index))[0]
        assert output.token_ids == expected.token_ids


def test_5_cancelled_at_any_step_it_leaves_nothing(path, technique, alone):
    llm = load(path, technique, num_pages=40, max_seq_len=500)
    engine = llm.engine
    rng = np.random.default_rng(3)
    for cancelled in range(0, 8, 2):
        ids = [engine.add(prompt, params.to_core()) for prompt, params in asks()]
        for _ in range(int(rng.integers(0, 12))):
            engine.step()
        engine.cancel(ids[cancelled])
        while engine.has_work():
            engine.step()
        engine.kv_cache.check_integrity()
        assert engine.kv_cache.available_pages == engine.kv_cache.num_pages
    assert texts(llm, asks()) == alone


def wrong_values() -> list[Any]:
    return [
        pytest.param(kind, field.name, value, id=f"{name}-{field.name}-{value!r}")
        for name, kind in REGISTRY.items()
        if issubclass(kind, Technique)
        for field in fields(kind)
        if isinstance(field.metadata.get("range"), Range)
        for value in field.metadata["range"].wrong_values()
    ]


@pytest.mark.parametrize(("kind", "field", "value"), wrong_values())
def test_6_wrong_values_are_refused_by_name(kind, field, value):
    with pytest.raises(effinfer.InvalidArgumentError, match=rf"\[{kind.__name__}\] {field}: "):
        kind(**{field: value})


def test_7_a_plain_request_beside_it_keeps_its_bits(path, technique, plain, alone):
    llm = load(path, technique)
    requests = asks()
    off = [
        (prompt, replace(params, techniques=() if i % 2 else None))
        for i, (prompt, params) in enumerate(requests)
    ]
    expected = [plain[i] if i % 2 else alone[i] for i in range(len(requests))]
    for _ in range(2):
        assert texts(llm, off) == expected
    on = [
        (prompt, replace(params, techniques=None if i % 2 else [technique.name]))
        for i, (prompt, params) in enumerate(requests)
    ]
    assert texts(llm, on) == alone
    everything_off = [(prompt, replace(params, techniques=())) for prompt, params in requests]
    assert texts(llm, everything_off) == plain


def test_8_it_says_what_it_does(path, technique):
    assert repr(technique) in load(path, technique).explain()
    written = json.loads(technique.to_json())
    assert written.pop("technique") == technique.name
    assert type(technique).from_fields(written) == technique


def test_8_an_artifact_needs_no_python(path, technique, alone, tmp_path):
    files = open_model(path)
    graph = effinfer.techniques.Installed([technique]).graph(files.graph)
    artifact = tmp_path / "with.gguf"
    assert files.gguf is not None
    _core.write_gguf_with_metadata(files.gguf, GRAPH_KEY, graph.to_string(), str(artifact))
    if isinstance(technique, TargetExtension):  # its own weights are in no artifact
        with pytest.raises(effinfer.Error, match=f"{technique.name}.*weight"):
            load(artifact, None)
        return
    if not effinfer.techniques.Installed([technique]).setup(files.graph, None).hooks:
        assert texts(load(artifact, None), asks()) == alone


def test_9_python_is_not_called_in_a_step(path, technique):
    setup = load(path, technique).techniques.setup(open_model(path).graph, None)
    in_python = [hook for hook in setup.hooks if not isinstance(hook, _core.StepHook)]
    assert bool(in_python) == technique.META.python_steps


def test_10_it_is_short(technique):
    assert len(inspect.getsource(inspect.getmodule(type(technique))).splitlines()) < 100

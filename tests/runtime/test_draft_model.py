"""Models that draft: texts, log-probabilities and the bytes of the cache are plain decoding's; a
draft that is the target itself is always right; what a draft model cannot do ends its drafts."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import effinfer
from effinfer import _core
from effinfer.checkpoints.model_files import ModelFiles
from effinfer.speculation import Speculation
from effinfer.techniques import DraftModel, EarlyExit, SkipLayers, VocabTrim
from effinfer.testing import make_model, make_twin
from tests.reference import tiny
from tests.runtime.test_drafts import SHAPES, Answer, make_engine, ragged, run, same

LAYERS = {"llama": SkipLayers([1]), "gemma3": EarlyExit(4)}


def proposer(model: ModelFiles, **options: Any) -> _core.Proposer:
    options = {"length": 5, "adaptive": False, **options}
    return _core.draft_model_proposer(model.graph, model.weights, **options)


def speculation(drafts: _core.Proposer, controller: int = 30, **options: Any) -> _core.Speculation:
    return Speculation([drafts], controller=controller, **options).build()


def metrics(engine: _core.Engine, count: int) -> list[dict[str, Any]]:
    return [engine.metrics(i + 1)["speculation"] for i in range(count)]


def check(model: ModelFiles, drafts: _core.Proposer, name: str, **options: Any) -> list[Any]:
    """Metrics of requests whose answers were plain decoding's to the byte."""
    asks = ragged(6, tiny.VOCAB_SIZE, most=60)
    options = {"prefix_cache": False, **options}
    plain = run(make_engine(model, **options), asks, SHAPES[name])
    engine = make_engine(model, speculation=speculation(drafts), **options)
    drafted = run(engine, asks, SHAPES[name])
    same(drafted, plain)
    for got, expected in zip(drafted, plain, strict=True):
        length = min(got.kv.shape[3], expected.kv.shape[3])
        assert length > 20
        np.testing.assert_array_equal(got.kv[:, :, :, :length], expected.kv[:, :, :, :length])
    return metrics(engine, len(asks))


@pytest.mark.parametrize(
    "options",
    [{}, {"precision": "f32", "max_batch_tokens": 17}, {"deterministic": True, "kv_dtype": "i8"}],
    ids=str,
)
@pytest.mark.parametrize("width", [1, 3])
def test_another_model_drafts_and_changes_nothing(models, width, options):
    # Gemma's tiny model has the vocabulary of llama's, and another idea of what follows.
    found = check(models["llama"], proposer(models["gemma3"], width=width), "llama", **options)
    assert sum(m["drafted"] for m in found) > 60


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("width", [1, 3])
def test_layers_of_the_target_draft_and_change_nothing(models, name, width):
    model = models[name]
    drafts = _core.draft_model_proposer(
        LAYERS[name].apply(model.graph), model.weights, of_target=True, width=width, adaptive=False
    )
    found = check(model, drafts, name, threads=1)
    assert sum(m["drafted"] for m in found) > 60


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_the_target_itself_drafts_what_it_will_say(models, name, width):
    """Every level of a tree that grows over steps is right only where pages, positions and
    ancestors are: greedy texts then follow it to its end, but where pages cut it."""
    asks = ragged(5, tiny.VOCAB_SIZE, temperature=0.0)
    asks = [(prompt, _plain(params)) for prompt, params in asks]
    model = sharpened(models[name])
    drafts = proposer(model, length=6, width=width)
    options = {"precision": "f32", "prefix_cache": False}
    engine = make_engine(model, speculation=speculation(drafts, 63), **options)
    run(engine, asks)
    for ask, found in zip(asks, metrics(engine, len(asks)), strict=True):
        steps = ask[1].max_tokens - found["accepted"]
        assert found["accepted"] >= 4.5 * steps


def sharpened(model: ModelFiles) -> ModelFiles:
    """Sure of itself: an unsure draft ends early."""
    name = "output_norm.weight"
    weights = _core.LayeredWeights(model.weights)
    values = np.ascontiguousarray(model.weights.dequantize(name) * 12)
    weights.add(name, values, "f32", list(values.shape))
    return replace(model, weights=weights)


def _plain(params: _core.SamplingParams) -> _core.SamplingParams:
    return _core.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=params.max_tokens)


@pytest.mark.parametrize("verify", ["rejection", "traversal"])
@pytest.mark.parametrize("width", [1, 3])
def test_what_is_drawn_from_the_target_itself_is_accepted(models, verify, width):
    """p = q: the first child is accepted with probability 1, but for rounding and for what the 64
    candidates lack."""
    rng = np.random.default_rng(1)
    asks = [
        (
            rng.integers(0, tiny.VOCAB_SIZE, 20).tolist(),
            _core.SamplingParams(
                temperature=0.8, top_k=8, seed=seed, max_tokens=50, ignore_eos=True
            ),
        )
        for seed in range(4)
    ]
    texts = []
    for _ in range(2):
        drafts = proposer(models["llama"], length=5, width=width)
        spec = speculation(drafts, 63, verify=verify)
        engine = make_engine(models["llama"], speculation=spec, precision="f32", prefix_cache=False)
        texts.append([answer.tokens for answer in run(engine, asks)])
        for found in metrics(engine, len(asks)):
            assert found["accepted"] >= 4 * (50 - found["accepted"])
    assert texts[0] == texts[1]


def sampled_asks() -> list[Any]:
    rng = np.random.default_rng(2)
    params = {"temperature": 1.2, "top_k": 30, "max_tokens": 60, "ignore_eos": True}
    return [
        (rng.integers(0, tiny.VOCAB_SIZE, 20).tolist(), _core.SamplingParams(seed=i, **params))
        for i in range(6)
    ]


def accepted_share(engine: _core.Engine) -> float:
    found = metrics(engine, len(sampled_asks()))
    return sum(m["accepted"] for m in found) / sum(m["drafted"] for m in found)


def test_draws_of_the_target_itself_are_foreseen(models):
    """The numbers of the draws are known: whoever believes the same finds what they will draw."""
    options = {"precision": "f32", "prefix_cache": False}
    plain = run(make_engine(models["llama"], **options), sampled_asks())
    shares = []
    for verify in ("match", _core.ReplayVerifier()):
        spec = speculation(proposer(models["llama"]), 63, verify=verify)
        engine = make_engine(models["llama"], speculation=spec, **options)
        same(run(engine, sampled_asks()), plain)
        shares.append(accepted_share(engine))
    # A number nearer to a share's bound than the narrowest spread, 1 / 256, may be missed.
    assert shares[0] > 0.93
    # A verifier that may emit other tokens gets the likeliest ones.
    assert shares[1] < 0.6


def test_a_smaller_head_drafts_its_tokens_only(models):
    model = models["llama"]
    tokens = list(range(0, tiny.VOCAB_SIZE, 2))
    graph, weights = VocabTrim(tokens).apply(model.graph, model.weights)
    drafts = _core.draft_model_proposer(graph, weights, of_target=True, adaptive=False)
    found = check(model, drafts, "llama")
    assert sum(m["drafted"] for m in found) > 100
    greedy = [(p, _plain(params)) for p, params in ragged(3, tiny.VOCAB_SIZE)]
    drafts = _core.draft_model_proposer(graph, weights, of_target=True, adaptive=False)
    engine = make_engine(model, speculation=speculation(drafts), precision="f32")
    answers = run(engine, greedy)
    even = sum(token % 2 == 0 for answer in answers for token in answer.tokens)
    assert 0 < sum(m["accepted"] for m in metrics(engine, 3)) <= even


def warned(
    engine: _core.Engine, asks: list[Any], pause_s: float = 0.0
) -> tuple[list[Answer], dict[int, list[str]]]:
    """Answers and warnings; after each step others have `pause_s` to do something."""
    ids = [engine.add(prompt, params) for prompt, params in asks]
    answers, warnings = {i: Answer() for i in ids}, {i: [] for i in ids}
    while engine.has_work():
        for output in engine.step():
            assert output.error == ""
            answers[output.request].tokens += output.token_ids
            answers[output.request].logprobs += [(t.logprob, t.top) for t in output.tokens]
            answers[output.request].finish = output.finish_reason
            if output.warning:
                warnings[output.request].append(output.warning)
        time.sleep(pause_s)
    return list(answers.values()), warnings


@pytest.mark.parametrize(
    ("what", "part"),
    [("context", "context of 70 tokens"), ("pages", "no page is left"), ("nan", "NaN")],
)
def test_what_a_draft_model_cannot_do_is_told_once(models, tmp_path, what, part):
    model, draft, options = models["llama"], models["llama"], {}
    if what == "context":
        text = model.graph.to_string()
        context = model.graph.metadata["context_length"]
        cut = _core.Graph.parse(text.replace(f"context_length = {context}", "context_length = 70"))
        drafts = _core.draft_model_proposer(cut, model.weights, adaptive=False)
    elif what == "pages":
        drafts = proposer(draft, num_pages=2)
    else:
        broken = _core.LayeredWeights(model.weights)
        name = "blk.1.ffn_norm.weight"
        broken.add(
            name,
            np.full(model.weights.shape(name), np.nan, np.float32),
            "f32",
            list(model.weights.shape(name)),
        )
        drafts = _core.draft_model_proposer(model.graph, broken, adaptive=False)
    asks = ragged(6, tiny.VOCAB_SIZE)
    plain = run(make_engine(model, prefix_cache=False, **options), asks)
    engine = make_engine(model, prefix_cache=False, speculation=speculation(drafts))
    answers, warnings = warned(engine, asks)
    same(answers, plain)
    told = [messages for messages in warnings.values() if messages]
    assert told and all(len(messages) == 1 and part in messages[0] for messages in told)
    assert [m["refused_drafts"] for m in metrics(engine, 6)] == [len(w) for w in warnings.values()]


def test_cancelled_and_many_requests_leave_no_page(models):
    drafts = proposer(models["llama"], num_pages=40, width=2)
    engine = make_engine(models["llama"], speculation=speculation(drafts), max_sequences=3)
    asks = ragged(8, tiny.VOCAB_SIZE)
    plain = run(make_engine(models["llama"], prefix_cache=False), asks)
    drafted = run(engine, asks, cancel=(0, 4))
    same([drafted[i] for i in (1, 2, 3, 5, 6, 7)], [plain[i] for i in (1, 2, 3, 5, 6, 7)])
    # A second round finds the prompts of the first in the draft's cache.
    again, warnings = warned(engine, asks)
    assert not any(warnings.values())


def test_a_proposer_is_of_one_engine(models):
    drafts = proposer(models["llama"])
    engine = make_engine(models["llama"], speculation=speculation(drafts))
    with pytest.raises(effinfer.InvalidArgumentError, match="in use"):
        make_engine(models["llama"], speculation=speculation(drafts))
    assert run(engine, ragged(1, tiny.VOCAB_SIZE))[0].finish == "length"


def test_wrong_options():
    model = open_model_of_nothing()
    for options, part in [
        ({"length": 0}, r"length: expected 1\.\.63"),
        ({"width": 9}, r"width: expected 1\.\.8"),
        ({"length": 32, "width": 2}, r"length \* width"),
        ({"num_pages": -1}, "num_pages"),
    ]:
        with pytest.raises(effinfer.InvalidArgumentError, match=part):
            _core.draft_model_proposer(model, _core.MemoryWeights(), **options)


def open_model_of_nothing() -> _core.Graph:
    return _core.Graph.parse("graph g {\n  input %token_ids : i32[T]\n  return %token_ids\n}\n")


def test_llm_takes_a_draft_model_and_refuses_another_vocabulary(tmp_path):
    path = make_model("llama-tiny", tmp_path / "target.gguf")
    twin = make_twin(path, tmp_path / "twin.gguf", depth=3)
    prompt = list(range(5, 40))
    params = effinfer.SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with effinfer.LLM(twin) as llm:
        expected = llm.generate([prompt], params)[0].token_ids
    with effinfer.LLM(path) as llm:  # the twin has the bits of the model
        assert llm.generate([prompt], params)[0].token_ids == expected
    fixed = Speculation([], controller=8)
    # Without a look at the clock, so that the count does not depend on what a level costs here.
    drafts = [
        DraftModel(m, width=w, adaptive=False) for m, w in [(path, 1), (path, 2), (EarlyExit(2), 1)]
    ]
    for draft in drafts:
        with effinfer.LLM(twin, draft_model=draft, speculation=fixed) as llm:
            output = llm.generate([prompt], params)[0]
            assert output.token_ids == expected
            assert output.metrics.speculation.accepted >= 25
            assert "proposer draft_model" in llm.explain() or "self_draft" in llm.explain()
    with effinfer.LLM(twin, draft_model=path) as llm:
        assert llm.generate([prompt], params)[0].token_ids == expected
    other = make_model("llama-tiny", tmp_path / "other.gguf", vocab=310)
    with pytest.raises(effinfer.InvalidArgumentError, match=r"token 298 is .*PAD.* not '<bos>'"):
        effinfer.LLM(path, draft_model=other)
    with pytest.raises(effinfer.InvalidArgumentError, match="draft_model: expected a model or"):
        effinfer.LLM(path, draft_model=3)
    with pytest.raises(effinfer.InvalidArgumentError, match="depth: expected 2 or more"):
        make_twin(path, tmp_path / "x.gguf", depth=1)

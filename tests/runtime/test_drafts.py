"""Drafts in engines: whatever a proposer guesses, tokens, log-probabilities and the bytes of the
cache are plain decoding's."""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from effinfer import _core
from effinfer._core import SamplingParams
from effinfer.checkpoints.model_files import open_model
from effinfer.speculation import Draft, Proposer, Speculation
from tests.draft_trees import keys_and_values, random_parents
from tests.model_files import gemma3_path, smollm2_path
from tests.reference import tiny

Ask = tuple[list[int], SamplingParams]


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish: str | None = None
    kv: np.ndarray | None = None  # while it ran


class Guesser(Proposer):
    """Knows what plain decoding says, and hides it in trees that are wrong, doubled, empty or as
    full as can be; what it finds in the texts must be what plain decoding said."""

    name = "guesser"

    def __init__(self, asks: list[Ask], plain: list[Answer], vocab: int, seed: int) -> None:
        self.texts = [[*p, *a.tokens] for (p, _), a in zip(asks, plain, strict=True)]
        self.vocab = vocab
        self.rng = np.random.default_rng(seed)
        self.accepted = 0
        self.largest = 0

    def propose(self, views: list[dict[str, Any]]) -> list[Draft | None]:
        return [self.draft(view) for view in views]

    def draft(self, view: dict[str, Any]) -> Draft | None:
        known = view["tokens"].tolist()
        text = self.texts[view["request"] - 1]
        assert text[: len(known)] == known
        kind = int(self.rng.integers(6))
        if kind == 0:
            return None if self.rng.integers(2) else Draft()
        most = view["max_nodes"]
        parents = random_parents(self.rng, most if kind == 1 else int(self.rng.integers(1, 14)))
        parents = parents[:most]
        depths, tokens = [], []
        for parent in parents:
            depth = depths[parent] + 1 if parent >= 0 else 0
            depths.append(depth)
            place = len(known) + depth
            right = text[place] if place < len(text) else 0
            wrong = int(self.rng.integers(self.vocab))
            # Siblings are often the same token twice; a node below a wrong one may be right.
            tokens.append(right if kind < 4 and self.rng.integers(4) else wrong)
        return Draft(tokens, parents, self.rng.random(len(tokens)).tolist())

    def observe(self, facts: list[dict[str, Any]]) -> None:
        for fact in facts:
            assert fact["num_emitted"] == len(fact["accepted"]) + 1
            self.accepted += len(fact["accepted"])
            if fact["verified"] is not None:
                self.largest = max(self.largest, len(fact["verified"]))


def make_engine(model: Any, threads: int = 2, **options: Any) -> _core.Engine:
    pool = _core.ThreadPool(threads, oversubscribe=True)
    return _core.Engine(model.graph, model.weights, pool, **options)


def run(
    engine: _core.Engine,
    asks: list[Ask],
    shape: tuple[int, int] | None = None,
    cancel: tuple[int, ...] = (),
    pause_s: float = 0.0,
) -> list[Answer]:
    """Steps until all have ended, each checked; after each one others have `pause_s` of time. With
    a shape (layers, head_dim) the keys and values of each sequence are read before it ends: those
    of the n-th request are of sequence n."""
    ids = [engine.add(prompt, params) for prompt, params in asks]
    answers = {i: Answer() for i in ids}
    steps = 0
    while engine.has_work():
        steps += 1
        for output in engine.step():
            assert output.error == "" and output.warning == ""
            answer = answers[output.request]
            answer.tokens += output.token_ids
            answer.logprobs += [(t.logprob, t.top) for t in output.tokens]
            answer.finish = output.finish_reason
        engine.kv_cache.check_integrity()
        if steps == 7:
            for index in cancel:
                engine.cancel(ids[index])
        for sequence, answer in enumerate(answers.values()):
            if shape and answer.tokens and answer.finish is None:
                full = FULL_LAYERS if engine.kv_cache.num_groups > 1 else None
                kv = keys_and_values(engine.kv_cache, sequence, *shape, engine.kv_dtype, full)
                if full is not None and answer.kv is not None:
                    # What a window has freed since was read in an earlier step.
                    freed = kv.shape[3] - held_tokens(engine.kv_cache, sequence)
                    windows = [i for i in range(shape[0]) if i not in full]
                    kv[windows, :, :, :freed] = answer.kv[windows, :, :, :freed]
                answer.kv = kv
        time.sleep(pause_s)
    return list(answers.values())


def held_tokens(cache: _core.KvCache, sequence: int) -> int:
    """Of the layers with a window."""
    freed = sum(page < 0 for page in cache.pages(sequence, 1))
    return cache.slots(sequence, 1) - 64 * freed


def ragged(count: int, vocab: int, most: int = 90, **changes: Any) -> list[Ask]:
    """Prompts on and beside the page of 64, greedy and sampled, with everything a request has."""
    rng = np.random.default_rng(count)
    lengths = [63, 1, 64, 30, 65, 90, 7, 127][:count]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 5},
        {"temperature": 0.8, "seed": 1, "repetition_penalty": 1.3, "presence_penalty": 0.4},
        {"temperature": 0.0, "frequency_penalty": 0.6, "logprobs": 3},
        {"temperature": 0.8, "seed": 9, "top_p": 0.9, "logprobs": 0},
        {"temperature": 0.0, "logit_bias": {3: 4.0, 17: -2.0}, "logprobs": 2},
        {"temperature": 0.8, "seed": 2, "top_k": 5},
        {"temperature": 0.8, "seed": 4, "min_p": 0.1, "logit_bias": {9: 3.0}},
    ]
    asks = []
    for i, length in enumerate(lengths):
        options = {"ignore_eos": True, "max_tokens": most - 7 * i, **kinds[i], **changes}
        asks.append((rng.integers(0, vocab, length).tolist(), SamplingParams(**options)))
    return asks


FULL_LAYERS = (5,)  # of gemma3
SHAPES = {"llama": (3, 16), "gemma3": (7, 32), "mistral": (3, 16)}
# Model, requests, options of the engine. Prefixes are reused where prompts repeat (below).
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("llama", 1, {"kv_dtype": "f32"}),
    ("llama", 8, {"kv_dtype": "f16", "threads": 1}),
    ("llama", 8, {"threads": 3}),
    ("llama", 5, {"kv_dtype": "i8"}),
    ("llama", 8, {"precision": "f32"}),
    ("llama", 8, {"precision": "f32", "kv_dtype": "i8", "max_batch_tokens": 17}),
    ("llama", 8, {"deterministic": True, "max_batch_tokens": 40}),
    ("llama", 4, {"deterministic": True, "max_batch_tokens": 5, "threads": 3}),
    ("gemma3", 8, {}),
    ("gemma3", 3, {"precision": "f32", "threads": 1}),
    ("gemma3", 6, {"deterministic": True, "kv_dtype": "f16", "max_batch_tokens": 33}),
    ("mistral", 8, {"kv_dtype": "i8", "threads": 3}),
    ("mistral", 8, {"precision": "f32", "max_batch_tokens": 20}),
    ("mistral", 2, {"deterministic": True}),
]


def same(left: list[Answer], right: list[Answer]) -> None:
    for got, expected in zip(left, right, strict=True):
        assert got.tokens == expected.tokens
        assert got.logprobs == expected.logprobs
        assert got.finish == expected.finish


@pytest.mark.parametrize(("name", "count", "options"), CASES, ids=str)
def test_any_draft_leaves_tokens_logprobs_and_bytes_as_they_are(models, name, count, options):
    asks = ragged(count, tiny.VOCAB_SIZE)
    options = {"prefix_cache": False, **options}
    plain = run(make_engine(models[name], **options), asks, SHAPES[name])
    guesser = Guesser(asks, plain, tiny.VOCAB_SIZE, seed=count)
    speculation = Speculation([guesser], controller=63).build()
    engine = make_engine(models[name], speculation=speculation, **options)
    drafted = run(engine, asks, SHAPES[name])
    same(drafted, plain)
    assert guesser.accepted > 7 * count
    room = options.get("max_batch_tokens", 512) - count
    assert guesser.largest >= min(40 if count == 1 else 10, room)
    compared = 0
    for got, expected in zip(drafted, plain, strict=True):
        length = min(got.kv.shape[3], expected.kv.shape[3])
        np.testing.assert_array_equal(got.kv[:, :, :, :length], expected.kv[:, :, :, :length])
        compared += length
    assert compared > sum(len(prompt) for prompt, _ in asks)


@pytest.mark.parametrize(("count", "threads"), [(2, 1), (8, 2)])
@pytest.mark.parametrize("name", SHAPES)
def test_a_batch_leaves_the_bytes_of_each_alone(models, name, count, threads):
    """Without drafts: what the tests above compare with."""
    asks = ragged(count, tiny.VOCAB_SIZE, most=70)
    options = {"prefix_cache": False, "precision": "f32", "threads": threads}
    together = run(make_engine(models[name], **options), asks, SHAPES[name])
    for ask, got in zip(asks, together, strict=True):
        (alone,) = run(make_engine(models[name], **options), [ask], SHAPES[name])
        assert got.tokens == alone.tokens
        np.testing.assert_array_equal(got.kv, alone.kv)


@pytest.mark.parametrize("mode", [{"precision": "f32"}, {"deterministic": True}, {}], ids=str)
@pytest.mark.parametrize("pages", [4, 7])
def test_preempted_requests_draft_and_read_the_same(models, mode, pages):
    asks = ragged(8, tiny.VOCAB_SIZE)
    plain = run(make_engine(models["llama"], prefix_cache=False, **mode), asks)
    guesser = Guesser(asks, plain, tiny.VOCAB_SIZE, seed=pages)
    speculation = Speculation([guesser], controller=20).build()
    engine = make_engine(models["llama"], num_pages=pages, speculation=speculation, **mode)
    same(run(engine, asks), plain)
    assert guesser.accepted > 0
    assert engine.stats()["preemptions"] > 0


@pytest.mark.parametrize("mode", [{"precision": "f32"}, {"deterministic": True}], ids=str)
def test_prefixes_that_drafts_wrote_are_reused(models, mode):
    """A second round finds the pages of the first: prompts, and what was accepted behind them."""
    asks = ragged(6, tiny.VOCAB_SIZE)
    plain = run(make_engine(models["gemma3"], prefix_cache=False, **mode), asks)
    longer = [
        ([*prompt, *answer.tokens], params)
        for (prompt, params), answer in zip(asks, plain, strict=True)
    ]
    expected = run(make_engine(models["gemma3"], prefix_cache=False, **mode), longer)
    guesser = Guesser([*asks, *longer], [*plain, *expected], tiny.VOCAB_SIZE, seed=3)
    speculation = Speculation([guesser], controller=12).build()
    engine = make_engine(models["gemma3"], speculation=speculation, **mode)
    same(run(engine, asks), plain)
    same(run(engine, longer), expected)
    assert sum(engine.metrics(7 + i)["cached_tokens"] for i in range(6)) >= 6 * 64


def test_cancelled_and_stopped_requests_leave_the_others_alone(models):
    asks = ragged(8, tiny.VOCAB_SIZE)
    options = {"prefix_cache": False, "deterministic": True}
    first = run(make_engine(models["llama"], **options), asks)
    for (_, params), answer in zip(asks[4:], first[4:], strict=True):
        params.stop_token_ids = [answer.tokens[11]]
    plain = run(make_engine(models["llama"], **options), asks)
    assert {answer.finish for answer in plain[4:]} == {"stop"}
    guesser = Guesser(asks, first, tiny.VOCAB_SIZE, seed=1)
    speculation = Speculation([guesser], controller=16).build()
    engine = make_engine(models["llama"], speculation=speculation, **options)
    drafted = run(engine, asks, cancel=(0, 2))
    kept = [1, 3, 4, 5, 6, 7]
    same([drafted[i] for i in kept], [plain[i] for i in kept])
    for i in (0, 2):
        assert drafted[i].finish == "cancelled"
        assert drafted[i].tokens == plain[i].tokens[: len(drafted[i].tokens)]
    assert engine.kv_cache.available_pages == engine.kv_cache.num_pages


def test_a_request_may_decline(models):
    asks = ragged(3, tiny.VOCAB_SIZE)
    asks[1][1].speculation = False
    plain = run(make_engine(models["llama"], prefix_cache=False), asks)
    guesser = Guesser(asks, plain, tiny.VOCAB_SIZE, seed=1)
    speculation = Speculation([guesser], controller=8).build()
    engine = make_engine(models["llama"], prefix_cache=False, speculation=speculation)
    same(run(engine, asks), plain)
    drafted = [engine.metrics(i)["speculation"]["drafted"] for i in (1, 2, 3)]
    assert drafted[1] == 0 and drafted[0] > 0 and drafted[2] > 0


@pytest.mark.parametrize(
    ("path", "shape"),
    [(smollm2_path, (30, 64)), (gemma3_path, (18, 256))],
    ids=["smollm2", "gemma"],
)
@pytest.mark.parametrize("mode", [{}, {"deterministic": True, "kv_dtype": "i8"}], ids=str)
def test_real_models(path, shape, mode):
    model = open_model(path())
    asks = ragged(3, 4000, most=26)
    asks[2][1].temperature = 0.0
    options = {"prefix_cache": False, "max_seq_len": 512, "num_pages": 16, **mode}
    plain = run(make_engine(model, **options), asks, shape)
    guesser = Guesser(asks, plain, 4000, seed=2)
    speculation = Speculation([guesser], controller=14).build()
    drafted = run(make_engine(model, speculation=speculation, **options), asks, shape)
    same(drafted, plain)
    assert guesser.accepted >= 10
    for got, expected in zip(drafted, plain, strict=True):
        length = min(got.kv.shape[3], expected.kv.shape[3])
        np.testing.assert_array_equal(got.kv[:, :, :, :length], expected.kv[:, :, :, :length])

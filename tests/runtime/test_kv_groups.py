"""Layers with a window free their keys: the bits of a cache that keeps all keys, in less of it."""

from typing import Any

import numpy as np
import pytest

from effinfer import _core
from effinfer._core import SamplingParams
from effinfer.checkpoints.model_files import ModelFiles, open_model
from effinfer.speculation import Speculation
from effinfer.techniques import PromptLookup
from tests.model_files import gemma3_path
from tests.reference import tiny

CONTEXT = 2048
CHUNK = 512
MODES: dict[str, dict[str, Any]] = {"f32": {"precision": "f32"}, "fast": {}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """Six layers, five of which attend to a window of 40 tokens."""
    config = {
        **tiny.FAMILIES["gemma3"],
        "max_position_embeddings": CONTEXT,
        "sliding_window": 40,
    }
    path = tmp_path_factory.mktemp("models") / "gemma3.gguf"
    return open_model(tiny.write_gguf(config, path))


def make_engine(model: ModelFiles, **options: Any) -> _core.Engine:
    return _core.Engine(model.graph, model.weights, _core.ThreadPool(2), **options)


class OneTable:
    """A model over a cache that keeps every key of every layer, fed by hand."""

    def __init__(self, model: ModelFiles, **options: Any) -> None:
        settings = _core.CompileOptions(
            max_tokens=CHUNK, max_rows=CHUNK, max_sequences=1, max_seq_len=CONTEXT, **options
        )
        pool = _core.ThreadPool(2)
        self.executable = _core.compile(model.graph, model.weights, pool, settings)
        self.cache = self.executable.make_cache(CONTEXT // 64)

    def feed(self, sequence: int, tokens: list[int], phase: str) -> np.ndarray:
        first = self.cache.length(sequence)
        self.cache.append(sequence, tokens)
        pages = self.cache.pages(sequence)
        logits = self.executable.run(
            token_ids=tokens,
            positions=list(range(first, first + len(tokens))),
            qo_indptr=[0, len(tokens)],
            kv_indptr=[0, len(pages)],
            kv_indices=pages,
            kv_len=[first + len(tokens)],
            logit_rows=list(range(len(tokens))),
            cache=self.cache,
            phase=phase,
        )
        self.cache.commit(sequence, len(tokens))
        return logits

    def logits(self, tokens: list[int]) -> np.ndarray:
        sequence, _ = self.cache.create([])
        parts = [
            self.feed(sequence, tokens[i : i + CHUNK], "prefill")
            for i in range(0, len(tokens), CHUNK)
        ]
        self.cache.release(sequence, keep_prefix=False)
        return np.concatenate(parts)

    def continue_text(self, prompt: list[int], count: int) -> list[int]:
        """Greedy tokens behind a prompt."""
        sequence, _ = self.cache.create([])
        for i in range(0, len(prompt), CHUNK):
            row = self.feed(sequence, prompt[i : i + CHUNK], "prefill")[-1]
        text = [int(np.argmax(row))]
        while len(text) < count:
            text.append(int(np.argmax(self.feed(sequence, text[-1:], "decode")[-1])))
        self.cache.release(sequence, keep_prefix=False)
        return text


def run(engine: _core.Engine, ids: list[int]) -> list[list[int]]:
    tokens: dict[int, list[int]] = {i: [] for i in ids}
    while engine.has_work():
        for output in engine.step_many(max_seconds=0.0):
            assert output.error == ""
            tokens[output.request] += output.token_ids
        engine.kv_cache.check_integrity()
    return [tokens[i] for i in ids]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    common = rng.integers(0, 256, 600).tolist()
    return [
        common + rng.integers(0, 256, 300).tolist(),
        common + rng.integers(0, 256, 40).tolist(),
        rng.integers(0, 256, 1000).tolist(),
        rng.integers(0, 256, 17).tolist(),
    ]


@pytest.mark.parametrize("mode", MODES)
def test_all_logits_have_the_bits_of_one_table(model: ModelFiles, mode: str) -> None:
    engine = make_engine(model, **MODES[mode])
    assert engine.kv_cache.num_groups == 2
    tokens = np.random.default_rng(1).integers(0, 256, 1500).tolist()
    expected = OneTable(model, **MODES[mode]).logits(tokens)
    assert np.array_equal(np.asarray(engine.logits(tokens)), expected)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix_cache": False, "max_batch_tokens": 100},
        {"num_pages": 26},
        {"num_pages": 26, "prefix_cache": False},
        {"speculation": Speculation([PromptLookup()])},
    ],
    ids=["plain", "chunks", "preempted", "preempted, fed again", "drafts"],
)
def test_texts_have_the_bits_of_one_table(model: ModelFiles, options: dict[str, Any]) -> None:
    reference = OneTable(model, precision="f32")
    expected = [reference.continue_text(prompt, 80) for prompt in prompts()]
    options = dict(options)
    speculation = options.pop("speculation", None)
    if speculation is not None:
        options["speculation"] = speculation.build()
    engine = make_engine(model, precision="f32", **options)
    for _ in range(2):  # again, on what is cached
        ids = [engine.add(prompt, greedy(80)) for prompt in prompts()]
        assert run(engine, ids) == expected
    if "num_pages" in options:
        assert engine.stats()["preemptions"] > 0


def test_answers_fork_a_prompt_whose_window_has_moved_on(model: ModelFiles) -> None:
    prompt = prompts()[0]
    expected = OneTable(model, precision="f32").continue_text(prompt, 200)
    engine = make_engine(model, precision="f32", max_sequences=2, prefix_cache=False)
    ids = engine.add_answers(prompt, [greedy(200 - 60 * i) for i in range(3)])
    assert run(engine, ids) == [expected, expected[:140], expected[:80]]
    # The prompt was computed once.
    assert [engine.metrics(i)["cached_tokens"] for i in ids] == [0, 899, 899]


def test_a_beginning_is_found_once_its_window_was_left(model: ModelFiles) -> None:
    first, second, *_ = prompts()
    engine = make_engine(model, precision="f32")
    cached = []
    for prompt in (first, second, second[:600] + first[:9], first + [1]):
        [request] = ids = [engine.add(prompt, greedy(2))]
        run(engine, ids)
        cached.append(engine.metrics(request)["cached_tokens"])
    assert cached == [0, 0, 576, 896]


def test_gemma_holds_a_quarter_with_the_same_bits() -> None:
    """At 1,600 tokens; tests/cpp/test_residency.cpp counts pages at 8,000."""
    model = open_model(gemma3_path())
    tokens = np.random.default_rng(2).integers(3, 50_000, 1600).tolist()
    engine = make_engine(model, max_seq_len=CONTEXT)
    reference = OneTable(model)
    expected = reference.continue_text(tokens, 4)
    request = engine.add(tokens, greedy(4))
    peak = 0
    texts = []
    while engine.has_work():
        for output in engine.step_many(max_seconds=0.0):
            texts += output.token_ids
            peak = max(peak, engine.kv_cache.used_bytes)
    assert texts == expected
    assert engine.metrics(request)["output_tokens"] == 4
    page = engine.kv_cache.num_bytes // engine.kv_cache.num_pages
    # 3 layers of 26 pages; 15 of the window, its slack and the page that it begins in.
    assert engine.kv_cache.used_bytes <= page * (26 * 3 + 15 * 11) // 18
    # A step of the prompt holds its chunk besides.
    assert peak <= page * (26 * 3 + 15 * 19) // 18

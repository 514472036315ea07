"""Layers that keep other numbers of keys: how one budget is shared out, what stays in each layer,
and that attention reads it."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

import effinfer
from effinfer import LLM, SamplingParams
from effinfer.techniques import KVCompose, Meta, SuffixDecoding, Technique, hook
from effinfer.techniques.layer_budgets import PAGE, budgets_by_layer
from effinfer.techniques.weights import with_weights
from tests.techniques.contract_model import long_model
from tests.techniques.watching import watching

LAYERS, HEADS = 3, 2
DROPPED = -1e4  # of a logit: nothing is left of its exponential


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return long_model(tmp_path_factory)


def load(path: Any, *techniques: Technique, **options: Any) -> LLM:
    settings = {"threads": 1, "prefix_cache": False, "max_batch_tokens": 128, **options}
    return LLM(path, techniques=list(techniques), **settings)


def prompt_of(count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(count).integers(0, 200, count).tolist()
    return tokens


def greedy(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **options)


def taken_one_by_one(scores: np.ndarray, budget: int, window: int) -> list[int]:
    """The same by a heap in float64: of all layers the most valuable page that is left."""
    layers, _, size = scores.shape
    least = window
    while (size - least) % PAGE != 0:
        least += 1
    ranked = np.sort(scores[:, :, : size - window].astype(np.float64), axis=2)[:, :, ::-1]
    worth = ranked.mean(axis=1)
    counts = [least] * layers

    def next_of(layer: int) -> tuple[float, int]:
        begin = counts[layer] - window
        return -float(worth[layer, begin : begin + PAGE].sum()), layer

    queue = [next_of(layer) for layer in range(layers)]
    heapq.heapify(queue)
    while sum(counts) + PAGE <= budget * layers:
        layer = heapq.heappop(queue)[1]
        counts[layer] += PAGE
        if counts[layer] < size:
            heapq.heappush(queue, next_of(layer))
    return counts


@pytest.mark.parametrize("size", [300, 320, 400, 1031])
@pytest.mark.parametrize("budget", [100, 130, 257])
def test_the_most_valuable_pages_of_all_layers_stay(size, budget):
    rng = np.random.default_rng(size + budget)
    scores = rng.exponential(size=(7, 3, size)) * rng.exponential(size=(7, 1, 1))
    for window in (1, 20, 64):
        counts = budgets_by_layer(scores.astype(np.float32), budget, window)
        if size - (size - window) // PAGE * PAGE >= budget:
            assert counts == [budget] * 7
            continue
        assert counts == taken_one_by_one(scores.astype(np.float32), budget, window)
        assert budget * 7 - PAGE < sum(counts) <= budget * 7
        assert len(set(counts)) > 1
        assert all(count >= window and (size - count) % PAGE == 0 for count in counts)


def test_a_budget_that_the_window_fills_is_that_of_every_layer():
    scores = np.ones((4, 2, 127), np.float32)
    assert budgets_by_layer(scores, 63, 32) == [63] * 4
    assert budgets_by_layer(scores, 64, 32) != [64] * 4  # a page of one layer


def ranked(scores: np.ndarray, shared: float) -> np.ndarray:
    layers = scores.reshape(LAYERS, HEADS, -1)
    return layers + np.float32(shared) * layers.mean(axis=1, keepdims=True)


def test_kv_compose_shares_one_budget_among_layers(path):
    """What stays in each layer's heads, the slots of its group, and the bytes of the pages."""
    method = KVCompose(budget=170, window=20, chunk_tokens=128, layer_budgets=True)
    size = 400
    seen: list[tuple[np.ndarray, list[np.ndarray], list[int]]] = []

    def look(sequence: Any) -> None:
        assert sequence.num_whole_groups == LAYERS and sequence.num_heads == LAYERS * HEADS
        groups = range(LAYERS)
        keys = [sequence.keys(head, group) for group in groups for head in range(HEADS)]
        slots = [sequence.slots(group) for group in groups]
        assert sequence.length == max(slots)
        seen.append((sequence.plane("kv_compose"), keys, slots))

    before = watching(look, "before", when="prompt_end")
    after = watching(look, "later", when="prompt_end")
    llm = load(path, before, method, after)
    engine = llm.engine
    engine.add(prompt_of(size), greedy(40).to_core())
    while len(seen) < 2:
        engine.step()
    used = engine.kv_cache.used_bytes
    (scores, keys, _), (_, kept, slots) = seen
    worth = ranked(scores, method.shared)
    assert slots == budgets_by_layer(worth, method.budget, method.window)
    assert len(set(slots)) > 1
    for layer, count in enumerate(slots):
        for head in range(HEADS):
            own = worth[layer, head]
            best = np.argsort(-own[: size - method.window], kind="stable")
            lists = [*np.sort(best[: count - method.window]), *range(size - method.window, size)]
            place = layer * HEADS + head
            np.testing.assert_array_equal(kept[place], keys[place][lists])
    pages = sum(-(-count // PAGE) for count in slots)
    assert used == pages * PAGE * HEADS * 2 * keys[0].shape[1] * 2  # bfloat16 keys and values
    while engine.has_work():
        engine.step()
        engine.kv_cache.check_integrity()


@dataclass(frozen=True)
class Picks(Technique):
    """Each layer keeps random slots of its own, `counts` of them, and the last ones."""

    META: ClassVar[Meta] = Meta(
        paper="a test",
        arxiv="",
        family="kv.eviction",
        primitives=("residency", "hooks"),
        effect="approximate",
        exclusive=("kv.resident",),
        python_steps=True,
        name="picks",
    )

    counts: tuple[int, ...] = (70, 200, 130)
    together: int = 1  # layers of a group
    weighted: bool = False  # nothing is dropped: what would be counts for nothing

    def facts(self) -> dict[str, Any]:
        if self.weighted:
            return {"chunk_tokens": 128, "weights": "picks.weights"}
        return {"chunk_tokens": 128, "layer_groups": self.together}

    def graph(self, graph: Any) -> Any:
        return with_weights(graph, "picks.weights") if self.weighted else graph

    @hook(when="prompt_end")
    def keep(self, event: Any, sequence: Any) -> None:
        size, rng = sequence.length, np.random.default_rng(5)
        lists = [
            np.sort([*rng.choice(size - 8, count - 8, False), *range(size - 8, size)])
            for count in self.counts
            for _ in range(HEADS)
        ]
        if self.weighted:
            weights = np.full((LAYERS * HEADS, size), DROPPED, np.float32)
            for head, slots in enumerate(lists):
                weights[head, slots] = 0.0
            sequence.set_plane("picks.weights", weights)
            return
        for group in range(sequence.num_whole_groups):
            first, end = sequence.first_head(group), sequence.first_head(group + 1)
            sequence.retain([slots.tolist() for slots in lists[first:end]], group)


def test_attention_reads_the_keys_that_each_layer_has(path):
    """As if what is dropped were there and counted for nothing."""
    prompts = [prompt_of(300), prompt_of(410)]
    exact = {"precision": "f32", "kv_dtype": "f32"}
    params = greedy(80, logprobs=5)
    own = load(path, Picks(), **exact).generate(prompts, params)
    expected = load(path, Picks(weighted=True), **exact).generate(prompts, params)
    plain = load(path, **exact).generate(prompts, params)
    for one, other, dense in zip(own, expected, plain, strict=True):
        assert one.error == "" and one.token_ids == other.token_ids
        assert one.token_ids != dense.token_ids
        ours, theirs = (
            np.array([[step.logprob, *(value for _, value in step.top)] for step in each.logprobs])
            for each in (one, other)
        )
        # The order of sums alone differs: some dozen roundings of three layers' attention.
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def test_groups_of_several_layers_keep_as_many(path):
    method = Picks(counts=(70, 70, 200), together=2)
    slots: list[list[int]] = []
    watch = watching(
        lambda s: slots.append([s.slots(group) for group in range(s.num_groups)]),
        "watch",
        when="every",
        tokens=1,
    )
    assert load(path, method, watch).generate([prompt_of(300)], greedy(3))[0].error == ""
    assert slots[0] == [71, 201]


@pytest.mark.parametrize("counts", [(70, 200, 130), (70, 198, 134)], ids=["apart", "aligned"])
def test_drafts_change_no_text(path, counts):
    """Tables that end at other places of a page, where nothing is drafted, and at the same."""
    prompts = [prompt_of(20) * 15, prompt_of(300)]
    plain = load(path, Picks(counts)).generate(prompts, greedy(60))
    llm = load(
        path, Picks(counts), speculation=effinfer.Speculation([SuffixDecoding()], controller=8)
    )
    drafted = llm.generate(prompts, greedy(60))
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    rows = sum(each.metrics.speculation.drafted for each in drafted)
    assert (rows > 0) == (counts == (70, 198, 134))


def test_what_does_not_know_of_several_tables_says_so(path):
    refused: list[Callable[[Any], Any]] = [
        lambda s: s.merge_slots(np.zeros((6, s.length), np.int32), "picks.more"),
        lambda s: s.retain([[0]] * (LAYERS * HEADS)),
        lambda s: s.slots(LAYERS),
        lambda s: s.first_head(LAYERS + 1),
        lambda s: s.keep_top("picks.more", 9, group=LAYERS),
    ]
    messages: list[str] = []

    def look(sequence: Any) -> None:
        for call in refused:
            with pytest.raises((effinfer.InvalidArgumentError, effinfer.UnsupportedError)) as error:
                call(sequence)
            messages.append(str(error.value))

    @dataclass(frozen=True)
    class Planes(Picks):
        def facts(self) -> dict[str, Any]:
            return {**super().facts(), "planes": "picks.more"}

    assert (
        load(path, Planes(), watching(look, when="prompt_end"))
        .generate([prompt_of(300)], greedy(2))[0]
        .error
        == ""
    )
    for message, part in zip(
        messages,
        ("several|of their own", "expected 1 or 2 lists", "group: expected", "group", "-1"),
        strict=True,
    ):
        assert any(each in message for each in part.split("|")), message

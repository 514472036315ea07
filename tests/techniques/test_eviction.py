"""Methods that drop keys: what stays, how long texts may get, and what hooks in Python may do."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest

import effinfer
from effinfer import LLM
from effinfer.techniques import (
    H2O,
    KVCompose,
    Meta,
    RaaS,
    SnapKV,
    StreamingLLM,
    StreamingVLM,
    Technique,
    WindowKV,
    hook,
)
from effinfer.testing import make_model
from tests.techniques.eviction_model import (
    CONTEXT,
    GROUP,
    best,
    greedy,
    load,
    prompt_of,
    watched,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_model("llama-tiny", tmp_path_factory.mktemp("models") / "m.gguf", context=CONTEXT)


def run(llm: LLM, prompt: list[int], count: int) -> tuple[list[int], int, int]:
    """The output of one request, the most pages that it had, and between steps the most slots or
    positions."""
    engine = llm.engine
    engine.add(prompt, greedy(count).to_core())
    cache = engine.kv_cache
    output: list[int] = []
    pages = slots = 0
    sequence = cache.create([])[0] + 1
    while engine.has_work():
        for step in engine.step():
            assert step.error == ""
            output += step.token_ids
        pages = max(pages, cache.num_pages - cache.available_pages)
        if engine.has_work():
            slots = max(slots, cache.slots(sequence), cache.next_position(sequence))
    cache.check_integrity()
    return output, pages, slots


def test_streaming_llm_writes_texts_of_any_length_through_few_slots(path):
    llm = load(path, StreamingLLM(sinks=4, recent=124, chunk_tokens=128))
    output, pages, slots = run(llm, prompt_of(3 * CONTEXT), 2 * CONTEXT)
    assert len(output) == 2 * CONTEXT
    assert slots <= 128
    assert pages <= (128 + 128) // 64  # and those of a step


def test_streaming_llm_with_room_for_all_has_the_bits_of_dense_decoding(path):
    prompt = prompt_of(200)
    expected, _, _ = run(load(path), prompt, 100)
    assert run(load(path, StreamingLLM(recent=400)), prompt, 100)[0] == expected
    probabilities = [
        load(path, *methods).generate([prompt], greedy(100, logprobs=0))[0].logprobs
        for methods in ((), (StreamingLLM(recent=400),), (StreamingLLM(recent=200),))
    ]
    assert probabilities[0] == probabilities[1] != probabilities[2]


def test_streaming_llm_ends_at_the_context_where_positions_grow(path):
    own = StreamingLLM(recent=124, reposition=False)
    assert len(run(load(path, own), prompt_of(CONTEXT - 20), 40)[0]) == 20
    for technique in (own, StreamingLLM(recent=CONTEXT)):  # which has no room for a step
        with pytest.raises(effinfer.InvalidArgumentError, match="prompt: expected at most 511"):
            load(path, technique).generate([prompt_of(CONTEXT)], greedy(1))
    with pytest.raises(effinfer.InvalidArgumentError, match="prompt: expected at most 511"):
        llm = load(path, StreamingLLM(recent=124))
        llm.generate([prompt_of(CONTEXT)], greedy(1, techniques=()))


def test_streaming_llm_sees_the_sinks_and_the_recent_tokens_alone(path):
    """Keys of the first layer, which know nothing of other tokens, are those of the kept tokens
    alone, at the positions of their slots."""
    prompt = prompt_of(256)
    kept = prompt[:4] + prompt[256 - 60 :]

    @dataclass(frozen=True)
    class Keys(Technique):
        META: ClassVar[Meta] = Meta(
            paper="a test",
            arxiv="",
            family="test.keys",
            primitives=("hooks",),
            effect="lossless",
            python_steps=True,
        )
        llm: object = None
        seen: object = None

        @hook(when="prompt_end")
        def look(self, event, sequence):
            cache = self.llm[0].engine.kv_cache
            pages = [cache.k_page(0, page) for page in cache.pages(sequence.id)]
            self.seen.append((sequence.length, np.concatenate(pages, axis=1)))

    seen: list[Any] = []
    for technique, tokens in ((StreamingLLM(recent=60, stride=1), prompt), (None, kept)):
        holder: list[LLM] = []
        others = [] if technique is None else [technique]
        watch = Keys(llm=holder, seen=seen)
        holder.append(load(path, *others, watch, kv_dtype="f32", precision="f32"))
        holder[0].generate([tokens], greedy(2))
    (slots, moved), (plain_slots, plain) = seen
    assert slots == plain_slots == 64
    moved, plain = moved.view(np.float32), plain.view(np.float32)
    # Keys of magnitude 1 were rotated at most 192 times by one position, and round each time.
    np.testing.assert_allclose(moved, plain, rtol=0, atol=192 * 2**-22 * np.abs(plain).max())


def test_streaming_llm_refuses_a_window_that_is_shorter_than_a_stride():
    with pytest.raises(
        effinfer.InvalidArgumentError, match=r"\[StreamingLLM\] recent: expected at least 64 .* 63"
    ):
        StreamingLLM(recent=63)


def changes(verb: str, *arguments: Any) -> Technique:
    """A technique that calls a verb of SequenceState at the prompt's end."""

    @dataclass(frozen=True)
    class Change(Technique):
        META: ClassVar[Meta] = Meta(
            paper="a test",
            arxiv="",
            family="test.change",
            primitives=("hooks",),
            effect="approximate",
            exclusive=("kv.resident",),
            python_steps=True,
        )
        seen: object = None

        @hook(when="prompt_end")
        def change(self, event, sequence):
            assert sequence.num_groups == 1
            before = sequence.length, sequence.next_position
            getattr(sequence, verb)(*arguments)
            self.seen.append((before, (sequence.length, sequence.next_position)))

    return Change(seen=[])


EVERY_SECOND = list(range(0, 100, 2))


@pytest.mark.parametrize(
    ("verb", "arguments", "after"),
    [
        ("retain", ([EVERY_SECOND],), (50, 100)),
        ("retain", ([EVERY_SECOND, *3 * [list(range(50))]],), (50, 100)),
        ("evict", (4, 68), (36, 100)),
        ("merge", (3, 7, [5, 7], [40.0, -40.0]), (100, 100)),
        ("reposition", ([10], -5), (100, 95)),
    ],
)
def test_hooks_in_python_may_change_which_keys_there_are(path, verb, arguments, after):
    technique = changes(verb, *arguments)
    llm = load(path, technique)
    output = llm.generate([prompt_of(100)], greedy(20, logprobs=0))[0]
    assert (output.error, technique.seen) == ("", [((100, 100), after)])
    plain = load(path).generate([prompt_of(100)], greedy(20, logprobs=0))[0]
    assert output.logprobs[0] == plain.logprobs[0]
    assert output.logprobs[1] != plain.logprobs[1]
    llm.engine.kv_cache.check_integrity()


@pytest.mark.parametrize(
    ("verb", "arguments", "error"),
    [
        ("retain", ([[3, 3]],), "retain: slots"),
        ("retain", ([[1], [2]],), "expected 1 or 4 lists, got 2"),
        ("retain", ([[1]], 1), "retain: group"),
        ("evict", (0, 100), "evict: slots"),
        ("merge", (4, 0, [1], [1.0]), "head: expected 0..3, got 4"),
        ("merge", (0, 0, [1, 2], [1.0]), "expected one for each"),
        ("reposition", ([0], -101), "reposition: delta"),
    ],
)
def test_what_the_cache_refuses_ends_the_request(path, verb, arguments, error):
    llm = load(path, changes(verb, *arguments))
    output = llm.generate([prompt_of(100)], greedy(20))[0]
    assert output.finish_reason == "error"
    assert error in output.error


def test_snapkv_keeps_what_the_last_rows_of_a_prompt_attend_to(path):
    method = SnapKV(budget=60, window=9, pool=5)
    seen = watched(path, method, prompt_of(300), 2, when="prompt_end")
    (scores, keys), (kept_scores, kept_keys) = seen
    assert scores.shape == (4, 300)
    # A row gives 1 of each query head, in sums of 300 floats that are below it.
    np.testing.assert_allclose(scores.sum(axis=1), 9 * GROUP, rtol=300 * 2**-24)
    assert (np.diff(scores[:, 290:], axis=1) != 0).all()  # of the window's rows, each sees more
    lists = best(scores, method.pool, method.budget, method.window)
    assert len({tuple(slots) for slots in lists}) == 4  # each head its own
    np.testing.assert_array_equal(kept_scores, np.take_along_axis(scores, lists, axis=1))
    expected = np.stack([keys[head][lists[head]] for head in range(2)])
    np.testing.assert_array_equal(kept_keys, expected)


def test_snapkv_in_python_is_the_same(path):
    native = SnapKV(budget=60, window=9, pool=5, pooling="avg")

    @dataclass(frozen=True)
    class Own(SnapKV):
        META: ClassVar[Meta] = replace(SnapKV.META, name="own", python_steps=True)

        def engine(self, setup):
            pass

        @hook(when="prompt_end")
        def keep(self, event, sequence):
            assert sequence.plane(self.name).shape == (4, sequence.length)
            sequence.keep_top(
                self.name, self.budget, last=self.window, pool=self.pool, pooling=self.pooling
            )

    own = Own(budget=60, window=9, pool=5, pooling="avg")
    probabilities = [
        load(path, *methods).generate([prompt_of(300)], greedy(40, logprobs=0))[0].logprobs
        for methods in ((native,), (own,), ())
    ]
    assert probabilities[0] == probabilities[1] != probabilities[2]


def test_window_kv_keeps_whole_spans_that_groups_of_layers_share(path):
    method = WindowKV(budget=60, window=9, span=7, group=2)
    seen = watched(path, method, prompt_of(300), 2, when="prompt_end")
    (scores, keys), (_, kept_keys) = seen
    np.testing.assert_allclose(scores[:2].sum(axis=1), 9 * GROUP, rtol=300 * 2**-24)
    assert (scores[2:] == 0).all()  # the second layer is not asked
    first = (300 - 9) % 7
    sums = scores[:2, first : 300 - 9].reshape(2, -1, 7).sum(axis=2)
    for head in range(2):
        best_spans = sorted(np.argsort(-sums[head], kind="stable")[: (60 - 9 - first) // 7])
        spans = [first + 7 * span + i for span in best_spans for i in range(7)]
        slots = [*range(first), *spans, *range(300 - 9, 300)]
        np.testing.assert_array_equal(kept_keys[head], keys[head][slots])


def test_kv_compose_ranks_by_a_heads_own_scores_and_the_layers_mean(path):
    method = KVCompose(budget=60, window=9, shared=0.5)
    seen = watched(path, method, prompt_of(300), 2, when="prompt_end")
    (scores, keys), (_, kept_keys) = seen
    layers = scores.reshape(2, 2, 300)
    ranked = (layers + 0.5 * layers.mean(axis=1, keepdims=True)).reshape(4, 300)
    lists = best(ranked, 1, method.budget, method.window)
    assert len({tuple(slots) for slots in lists}) == 4
    expected = np.stack([keys[head][lists[head]] for head in range(2)])
    np.testing.assert_array_equal(kept_keys, expected)


def test_streaming_vlm_keeps_windows_of_text_and_of_images(path):
    """Keys of the first layer are those of the kept tokens alone, at the positions of their
    slots."""
    images = tuple(range(200, 250))
    method = StreamingVLM(sinks=4, text=30, images=20, image_tokens=images, chunk_tokens=64)
    rng = np.random.default_rng(5)
    prompt = [
        int(token)
        for turn in range(8)
        for token in (*rng.integers(0, 200, 20), *rng.integers(200, 250, 12))
    ]
    texts = [i for i, token in enumerate(prompt) if i >= 4 and token < 200]
    pictures = [i for i, token in enumerate(prompt) if i >= 4 and token >= 200]
    kept = sorted([*range(4), *texts[-30:], *pictures[-20:]])
    (_, _), (_, moved) = watched(path, method, prompt, 2, when="prompt_end")
    plain = watched(path, H2O(), [prompt[i] for i in kept], 2, when="prompt_end")[0][1]
    assert moved.shape == plain.shape
    np.testing.assert_allclose(moved, plain, rtol=0, atol=256 * 2**-22 * np.abs(plain).max())


def test_streaming_vlm_streams_through_few_slots(path):
    images = tuple(range(100, 250))
    method = StreamingVLM(sinks=4, text=60, images=60, image_tokens=images, chunk_tokens=128)
    output, pages, slots = run(load(path, method), prompt_of(3 * CONTEXT), CONTEXT)
    assert len(output) == CONTEXT
    assert slots <= 124
    assert pages <= 4


@pytest.mark.parametrize("token", ["a", True, -1, 1.5])
def test_streaming_vlm_refuses_what_is_no_token(token):
    with pytest.raises(
        effinfer.InvalidArgumentError, match=r"\[StreamingVLM\] image_tokens: .* ids"
    ):
        StreamingVLM(image_tokens=(5, token))


def test_raas_keeps_the_prompt_and_what_was_read_last(path):
    seen: list[tuple[int, np.ndarray, np.ndarray]] = []

    @dataclass(frozen=True)
    class Seen(RaaS):
        META: ClassVar[Meta] = replace(RaaS.META, name="seen")

        @hook(when="every", tokens="stride")
        def stamp(self, event, sequence):
            seen.append((sequence.next_position, *map(sequence.plane, ("seen", "raas.stamps"))))
            super().stamp(event, sequence)

    method = Seen(budget=12, stride=4, alpha=0.02)
    assert load(path, method).generate([prompt_of(50)], greedy(40))[0].error == ""
    assert [position for position, _, _ in seen] == list(range(54, 90, 4))
    for (_, mass, stamps), (position, _, after) in zip(seen[:-1], seen[1:], strict=True):
        # Four rows of each query head, whose sums were set to 0 before them.
        np.testing.assert_allclose(mass.sum(axis=1), 4 * GROUP, rtol=100 * 2**-24)
        expected = stamps.copy()
        is_read = mass > 0.02 * 4
        is_read[:, -4:] = True
        expected[is_read] = position - 4
        count = min(50 + 12, mass.shape[1])
        ranked = expected.copy()
        ranked[:, :50] = np.inf
        lists = best(ranked, 1, count, 4)
        np.testing.assert_array_equal(after[:, :-4], np.take_along_axis(expected, lists, axis=1))
        assert (after[:, -4:] == 0).all()  # of new slots
    assert seen[-1][1].shape[1] == 50 + 12 + 4


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: SnapKV(budget=31), r"\[SnapKV\] budget: expected at least 32 \(window\), got 31"),
        (lambda: WindowKV(budget=39), r"\[WindowKV\] budget: expected at least 40 .* got 39"),
        (lambda: RaaS(budget=15), r"\[RaaS\] budget: expected at least 16 \(stride\), got 15"),
        (lambda: H2O(budget=575), r"\[H2O\] budget: expected at least 576 .* got 575"),
    ],
)
def test_budgets_hold_what_is_kept_anyway(make, error):
    with pytest.raises(effinfer.InvalidArgumentError, match=error):
        make()


@pytest.mark.parametrize(
    ("verb", "arguments", "error"),
    [
        ("plane", ("mass",), "plane: name: expected one of the sequence's (it has none)"),
        ("set_plane", ("mass", [[0.0]]), "plane: name: expected one of the sequence's"),
        ("keep_top", ("mass", 0), "[keep_top] count: expected at least 1"),
        ("keep_top", ("mass", 9, 5, 5), "[keep_top] count: expected at least 10 (first and last)"),
        ("keep_top", ("mass", 9, 0, 0, 4), "[keep_top] pool: expected an odd number"),
        ("keep_top", ("mass", 9, 0, 0, 3, "mean"), '[keep_top] pooling: expected "max" or "avg"'),
    ],
)
def test_wrong_choices_are_refused(path, verb, arguments, error):
    output = load(path, changes(verb, *arguments)).generate([prompt_of(20)], greedy(4))[0]
    assert error in output.error

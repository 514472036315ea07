"""Methods that drop keys: what stays, how long texts may get, and what hooks in Python may do."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest

import effinfer
from effinfer import LLM, SamplingParams
from effinfer.techniques import Meta, StreamingLLM, Technique, hook
from effinfer.testing import make_model

CONTEXT = 512


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_model("llama-tiny", tmp_path_factory.mktemp("models") / "m.gguf", context=CONTEXT)


def load(path: Any, *techniques: Technique, **options: Any) -> LLM:
    settings = {"threads": 1, "prefix_cache": False, "max_batch_tokens": 128, **options}
    return LLM(path, techniques=list(techniques), **settings)


def prompt_of(count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(count).integers(0, 250, count).tolist()
    return tokens


def greedy(count: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, **options)


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
    assert run(load(path, StreamingLLM(recent=200)), prompt, 100)[0] != expected


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
    output = llm.generate([prompt_of(100)], greedy(20))[0]
    assert (output.error, technique.seen) == ("", [((100, 100), after)])
    plain = load(path).generate([prompt_of(100)], greedy(20))[0]
    assert output.token_ids[0] == plain.token_ids[0]
    assert output.token_ids != plain.token_ids
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

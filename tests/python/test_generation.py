"""How requests become texts, on an engine made of scripts: stop strings, threads, Ctrl-C."""

import threading

import pytest
import tokenizers
from tokenizers import decoders, models

from effinfer import _core
from effinfer.requests.generation import Generation, TextStream
from effinfer.requests.loop import RequestLoop
from effinfer.sampling import SamplingParams
from effinfer.text.state import TextState
from effinfer.text.tokenizer import Tokenizer
from tests.scripted_engine import ScriptedEngine


@pytest.fixture
def tokenizer() -> Tokenizer:
    """Token n is the n-th letter."""
    vocab = {letter: index for index, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend)


def ids(text: str) -> list[int]:
    return [ord(letter) - ord("a") for letter in text]


def run(engine: ScriptedEngine, tokenizer: Tokenizer, *requests: tuple[int, SamplingParams]):
    generation = Generation(RequestLoop(engine), tokenizer, [([p], s) for p, s in requests])
    pieces = list(generation.run())
    return generation.outputs(), pieces


PLAIN = SamplingParams()


@pytest.mark.parametrize("steps", [1, 3, 100])
def test_outputs_keep_the_order_of_prompts(tokenizer, steps):
    engine = ScriptedEngine({1: ids("hello"), 2: ids("hi"), 3: ids("hey")}, steps)
    outputs, _ = run(engine, tokenizer, (1, PLAIN), (2, PLAIN), (3, PLAIN))
    assert [output.text for output in outputs] == ["hello", "hi", "hey"]
    assert [output.finish_reason for output in outputs] == ["length"] * 3
    assert not engine.known


@pytest.mark.parametrize("steps", [1, 100])
@pytest.mark.parametrize("stop", ["cd", ["xyz", "cde"], ["abcdx", "c"]])
def test_stop_strings_cut_the_text(tokenizer, stop, steps):
    engine = ScriptedEngine({1: ids("abcdef"), 2: ids("zzzzzzzz")}, steps)
    outputs, pieces = run(engine, tokenizer, (1, SamplingParams(stop=stop)), (2, PLAIN))
    assert outputs[0].text == "ab" == "".join(text for index, text in pieces if index == 0)
    assert outputs[0].finish_reason == "stop"
    assert ids("abc") == outputs[0].token_ids[:3]
    assert outputs[1].text == "zzzzzzzz"
    assert not engine.known


def test_a_failed_request_does_not_touch_the_others(tokenizer):
    engine = ScriptedEngine({1: [*ids("ab"), -1], 2: ids("fine")})
    outputs, _ = run(engine, tokenizer, (1, PLAIN), (2, PLAIN))
    assert (outputs[0].finish_reason, outputs[0].error) == ("error", "[engine] broke")
    assert outputs[0].text == "ab"
    assert outputs[1].text == "fine"


def test_a_bad_prompt_leaves_nothing_behind(tokenizer):
    engine = ScriptedEngine({1: ids("ab")})
    loop = RequestLoop(engine)
    with pytest.raises(_core.InvalidArgumentError, match="prompt"):
        Generation(loop, tokenizer, [([1], PLAIN), ([9], PLAIN)])
    assert engine.cancelled and not engine.running and not engine.known
    list(Generation(loop, tokenizer, [([1], PLAIN)]).run())
    assert not engine.known


def test_ctrl_c_cancels_and_loses_nothing_of_others(tokenizer):
    engine = ScriptedEngine({1: ids("abcdefgh"), 2: ids("other")})
    loop = RequestLoop(engine)
    other = Generation(loop, tokenizer, [([2], PLAIN)])
    engine.interrupted_step = 3
    interrupted = Generation(loop, tokenizer, [([1], PLAIN)])
    with pytest.raises(KeyboardInterrupt):
        list(interrupted.run())
    interrupted.close()
    list(other.run())
    assert other.outputs()[0].text == "other"
    assert other.outputs()[0].finish_reason == "length"
    assert not engine.known


def test_closing_a_stream_cancels_its_request(tokenizer):
    engine = ScriptedEngine({1: ids("abcdefgh")})
    loop = RequestLoop(engine)
    stream = TextStream(loop, tokenizer, [1], PLAIN)
    assert next(stream) == "a"
    stream.close()
    assert engine.cancelled and not engine.known  # without a later step
    dropped = TextStream(loop, tokenizer, [1], PLAIN)
    del dropped
    assert len(engine.cancelled) == 2 and not engine.known


def test_closing_a_stream_loses_nothing_of_others(tokenizer):
    engine = ScriptedEngine({1: ids("abcdefgh"), 2: ids("other")})
    loop = RequestLoop(engine)
    other = TextStream(loop, tokenizer, [2], PLAIN)
    stream = TextStream(loop, tokenizer, [1], PLAIN)
    assert next(stream) == "a"
    stream.close()
    assert "".join(other) == "other"
    assert not engine.known


def test_closing_the_loop_ends_what_runs(tokenizer):
    engine = ScriptedEngine({1: ids("abcdefgh")})
    loop = RequestLoop(engine)
    stream = TextStream(loop, tokenizer, [1], PLAIN)
    assert next(stream) == "a"
    loop.close()
    loop.close()
    assert not engine.running
    with pytest.raises(_core.InvalidArgumentError, match="closed"):
        TextStream(loop, tokenizer, [1], PLAIN)
    assert loop.engine is engine  # the stream may still ask how its request ended
    assert list(stream) == []
    assert stream.output().finish_reason == "cancelled"
    with pytest.raises(_core.InvalidArgumentError, match="closed"):
        _ = loop.engine


def test_a_stream_has_its_output_at_the_end(tokenizer):
    stream = TextStream(RequestLoop(ScriptedEngine({1: ids("abc")})), tokenizer, [1], PLAIN)
    with pytest.raises(_core.InvalidArgumentError, match="not ended"):
        stream.output()
    assert "".join(stream) == "abc" == stream.text == stream.output().text


def test_a_failed_stream_raises(tokenizer):
    stream = TextStream(RequestLoop(ScriptedEngine({1: [0, -1]})), tokenizer, [1], PLAIN)
    with pytest.raises(_core.Error, match="broke"):
        list(stream)


def test_threads_share_steps(tokenizer):
    engine = ScriptedEngine({n: ids("abcdefghij"[:n]) * 20 for n in range(1, 9)})
    loop = RequestLoop(engine)
    texts: dict[int, str] = {}

    def work(number: int) -> None:
        params = SamplingParams(max_tokens=1000)
        generation = Generation(loop, tokenizer, [([number], params)])
        list(generation.run())
        texts[number] = generation.outputs()[0].text

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert texts == {n: "abcdefghij"[:n] * 20 for n in range(1, 9)}
    assert not engine.known


def test_logprobs_come_when_asked_for(tokenizer):
    engine = ScriptedEngine({1: ids("abc")})
    with_them, without = run(engine, tokenizer, (1, SamplingParams(logprobs=0)), (1, PLAIN))[0]
    assert with_them.logprobs is not None and len(with_them.logprobs) == 3
    assert without.logprobs is None


@pytest.mark.parametrize("text", ["abab", "aabaabaac", "abacabab", "aaaa", "", "ab"])
@pytest.mark.parametrize("stop", [(), ("ab",), ("aac", "abab"), ("aaa", "b"), ("c",)])
def test_streamed_text_equals_the_text_cut_at_once(tokenizer, text, stop):
    cuts = [at for s in stop if (at := text.find(s)) >= 0]
    state = TextState(tokenizer, stop)
    streamed = ""
    for token in ids(text):
        streamed += state.push([token])
        if state.stopped:
            break
    streamed += state.finish()
    # The first stop string to be complete wins; then the earliest place where one begins.
    ends = {text.find(s) + len(s): text.find(s) for s in stop if s in text}
    expected = text[: ends[min(ends)]] if ends else text
    assert streamed == state.text == expected
    assert state.stopped == bool(cuts)

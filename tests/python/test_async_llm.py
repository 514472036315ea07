"""AsyncLLM: texts as LLM's, cancellation, slow readers, several event loops, the queue, the end."""

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import effinfer
from effinfer import LLM, AsyncLLM, SamplingParams
from effinfer.requests import engine_thread
from effinfer.requests.async_generation import AsyncStream
from tests.reference import tiny

pytestmark = pytest.mark.alone

PROMPTS = ["th", "he", "in"]
LONG = SamplingParams(max_tokens=16000, ignore_eos=True)


def params(seed: int = 1, **fields: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "ignore_eos": True, "seed": seed, **fields})


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    config = {**tiny.FAMILIES["llama"], "max_position_embeddings": 16384}
    return tiny.write_gguf(config, tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def llm(path) -> Iterator[AsyncLLM]:
    with AsyncLLM(path, threads=1, max_waiting=4, max_sequences=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(path) -> dict[str, str]:
    with LLM(path, threads=1) as llm:
        return {prompt: llm.generate(prompt, params())[0].text for prompt in PROMPTS}


async def wait_until_free(llm: AsyncLLM, seconds: float = 1.0) -> None:
    """Fails unless nothing runs and all pages are free within `seconds`."""
    end = time.monotonic() + seconds
    while (stats := llm.engine.stats())["running"] or stats["waiting"]:
        assert time.monotonic() < end, stats
        await asyncio.sleep(0.005)
    cache = llm.engine.kv_cache
    assert cache.available_pages == cache.num_pages


def test_texts_are_those_of_llm(llm, expected):
    async def main() -> None:
        outputs = await llm.generate(PROMPTS, params())
        assert {p: o.text for p, o in zip(PROMPTS, outputs, strict=True)} == expected
        stream = llm.stream(PROMPTS[0], params())
        assert "".join([piece async for piece in stream]) == expected[PROMPTS[0]]
        assert stream.output().text == stream.text == expected[PROMPTS[0]]
        stream = llm.stream(PROMPTS[1], params())
        text = ""
        while piece := await stream.read():
            text += piece
        assert text == expected[PROMPTS[1]]

    asyncio.run(main())


def test_many_tasks_share_steps(llm, expected):
    async def one(prompt: str) -> str:
        return "".join([piece async for piece in llm.stream(prompt, params())])

    async def main() -> list[str]:
        return await asyncio.gather(*map(one, PROMPTS))

    assert asyncio.run(main()) == [expected[prompt] for prompt in PROMPTS]


def test_several_event_loops(llm, expected):
    texts: dict[int, str] = {}

    def work(index: int) -> None:
        texts[index] = asyncio.run(llm.generate(PROMPTS[index], params()))[0].text

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert texts == {index: expected[prompt] for index, prompt in enumerate(PROMPTS)}


def test_a_cancelled_task_cancels_its_request(llm):
    async def read(stream: AsyncStream) -> None:
        async for _ in stream:
            pass

    async def main() -> None:
        tasks = [
            asyncio.create_task(llm.generate(PROMPTS, LONG)),
            asyncio.create_task(read(llm.stream("th", LONG))),
        ]
        await asyncio.sleep(0.05)
        assert llm.engine.stats()["running"]
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in done)
        await wait_until_free(llm)

    asyncio.run(main())


def test_closed_and_dropped_streams_are_cancelled(llm):
    async def main() -> None:
        async with llm.stream("th", LONG) as stream:
            assert await anext(stream)
        assert stream.output().finish_reason == "cancelled"
        dropped = llm.stream("th", LONG)
        assert await anext(dropped)
        del dropped
        gc.collect()
        await wait_until_free(llm)

    asyncio.run(main())


def test_a_loop_that_ends_with_requests_in_it(llm):
    async def main() -> None:
        main.stream = llm.stream("th", LONG)
        await anext(main.stream)

    asyncio.run(main())
    asyncio.run(wait_until_free(llm))


def test_stop_strings_end_a_stream(llm, expected):
    stop = expected["th"][5:7]

    async def main() -> None:
        stream = llm.stream("th", params(stop=stop))
        text = "".join([piece async for piece in stream])
        assert text == expected["th"][: expected["th"].find(stop)]
        assert stream.output().finish_reason == "stop"
        await wait_until_free(llm)

    asyncio.run(main())


def test_a_constraint_is_obeyed(llm):
    async def main() -> None:
        choice = params(choices=["abc", "abd"], ignore_eos=False)
        assert (await llm.generate("th", choice))[0].text in ("abc", "abd")
        assert "".join([piece async for piece in llm.stream("th", choice)]) in ("abc", "abd")
        with pytest.raises(effinfer.InvalidArgumentError, match="regex"):
            await llm.generate("th", params(regex="(("))

    asyncio.run(main())


def test_a_reader_that_stops_reading_is_cut_off(llm, monkeypatch):
    monkeypatch.setattr(engine_thread, "_PATIENCE_SECONDS", 0.0)  # a piece a step

    async def main() -> None:
        stream = llm.stream("th", LONG)
        while not stream.ended:
            await asyncio.sleep(0.01)
        output = stream.output()
        assert output.finish_reason == "error" and "256 pieces" in output.error
        pieces = 0
        with pytest.raises(effinfer.Error, match="256 pieces"):
            async for _ in stream:
                pieces += 1
        assert pieces == 256
        await wait_until_free(llm)

    asyncio.run(main())


def test_a_blocked_event_loop_loses_nothing(llm, expected):
    async def main() -> None:
        stream = llm.stream("th", params())
        time.sleep(0.3)  # noqa: ASYNC251
        assert "".join([piece async for piece in stream]) == expected["th"]

    asyncio.run(main())


def test_a_full_queue_is_a_typed_error(llm):
    async def main() -> None:
        streams = [llm.stream("th", LONG) for _ in range(8)]
        with pytest.raises(effinfer.QueueFullError, match="max_waiting"):
            llm.stream("th", LONG)
        streams[0].close()
        with pytest.raises(effinfer.QueueFullError):
            await llm.generate(["th", "he"], LONG)  # both or none
        streams[0] = llm.stream("th", LONG)
        for stream in streams:
            stream.close()
        await wait_until_free(llm)

    asyncio.run(main())


@pytest.mark.parametrize("prompt", ["", [], [10**7]])
def test_bad_prompts(llm, prompt):
    async def main() -> None:
        with pytest.raises(effinfer.InvalidArgumentError):
            llm.stream(prompt)
        with pytest.raises(effinfer.InvalidArgumentError):
            await llm.generate(["th", prompt], LONG)
        await wait_until_free(llm)

    asyncio.run(main())


def test_the_thread_sleeps_without_work(llm):
    steps = llm.engine.stats()["steps"]
    before = time.process_time()
    time.sleep(0.2)
    assert llm.engine.stats()["steps"] == steps
    assert time.process_time() - before < 0.1


def test_close_ends_requests_and_the_thread(path):
    before = threading.active_count()

    async def main() -> None:
        llm = AsyncLLM(path, threads=1)
        stream = llm.stream("th", LONG)
        await anext(stream)
        await asyncio.to_thread(llm.close)
        _ = [piece async for piece in stream]
        assert stream.output().finish_reason == "cancelled"
        with pytest.raises(effinfer.InvalidArgumentError, match="closed"):
            llm.stream("th")

    asyncio.run(main())
    assert threading.active_count() == before


def test_a_dropped_model_ends_its_thread(path):
    before = threading.active_count()
    llm = AsyncLLM(path, threads=1)
    assert threading.active_count() == before + 1
    del llm
    gc.collect()
    assert threading.active_count() == before


def test_a_stream_keeps_its_model(path, expected):
    async def main() -> str:
        stream = AsyncLLM(path, threads=1).stream("th", params())
        gc.collect()
        return "".join([piece async for piece in stream])

    before = threading.active_count()
    assert asyncio.run(main()) == expected["th"]
    gc.collect()
    assert threading.active_count() == before


def test_an_engine_that_stops_ends_every_stream(path, monkeypatch):
    class Broken:
        """Fails in its third step."""

        def __init__(self, engine: object) -> None:
            self.engine, self.steps = engine, 0

        def __getattr__(self, name: str) -> object:
            return getattr(self.engine, name)

        def step_many(self, *limits: float) -> object:
            self.steps += 1
            if self.steps > 3:
                raise effinfer.DeviceError("[cuda] gone")
            return self.engine.step_many(*limits)

    start = engine_thread.EngineThread.__init__
    monkeypatch.setattr(
        engine_thread.EngineThread,
        "__init__",
        lambda self, engine, most: start(self, Broken(engine), most),
    )

    async def main() -> None:
        with AsyncLLM(path, threads=1) as llm:
            stream = llm.stream("th", LONG)
            with pytest.raises(effinfer.Error, match="gone"):
                _ = [piece async for piece in stream]
            assert "gone" in llm.failure
            with pytest.raises(effinfer.Error, match="gone"):
                llm.stream("th")

    asyncio.run(main())


def test_one_wake_up_a_step_whatever_the_number_of_streams(llm, monkeypatch):
    monkeypatch.setattr(engine_thread, "_PATIENCE_SECONDS", 0.0)
    wake_ups = 0

    async def main() -> None:
        loop = asyncio.get_running_loop()
        call = loop.call_soon_threadsafe

        def count(*arguments: object, **options: object) -> object:
            nonlocal wake_ups
            wake_ups += 1
            return call(*arguments, **options)

        monkeypatch.setattr(loop, "call_soon_threadsafe", count)
        steps = llm.engine.stats()["steps"]
        await llm.generate(PROMPTS, params(max_tokens=100))
        assert 0 < wake_ups <= llm.engine.stats()["steps"] - steps + 1

    asyncio.run(main())

"""The loggers effinfer and effinfer.core."""

import logging

import pytest

from effinfer import LLM, _core
from effinfer.load_log import forward_core_log
from tests.reference import tiny


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny.write_gguf(tiny.FAMILIES["llama"], tmp_path_factory.mktemp("tiny") / "tiny.gguf")


def test_a_load_is_told(path, caplog, tmp_path):
    caplog.set_level(logging.INFO, "effinfer")
    LLM(path, pack_cache=tmp_path).close()
    of_core = [r.getMessage() for r in caplog.records if r.name == "effinfer.core"]
    assert any(text.startswith("compiled llama") for text in of_core)
    assert any(text.startswith("pack cache: stored") for text in of_core)
    assert any(str(path) in r.getMessage() for r in caplog.records if r.name != "effinfer.core")


def test_silence_by_default(path, capfd):
    with LLM(path) as llm:
        llm.generate("the", max_tokens=2)
    assert capfd.readouterr() == ("", "")


def test_requests_are_told_at_debug(path, caplog):
    caplog.set_level(logging.DEBUG, "effinfer")
    with LLM(path) as llm:
        llm.generate("the", max_tokens=2, ignore_eos=True)
    assert "length after 2 tokens" in caplog.text


def test_more_threads_than_there_are_cpus(path, caplog):
    with LLM(path, threads=999) as llm:
        assert llm.threads < 999
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert record.getMessage().startswith(f"threads: 999 asked for, {llm.threads} run")


def test_the_callback_of_the_core(path):
    heard = []
    try:
        _core.set_log_callback(lambda level, text: heard.append((level, text)), "info")
        LLM(path).close()
        assert heard and {level for level, _ in heard} == {"info"}

        def broken(level: str, text: str) -> None:
            raise ValueError("no")

        _core.set_log_callback(broken, "debug")
        LLM(path).close()  # is not stopped by it
        _core.set_log_callback(None, "info")
        count = len(heard)
        LLM(path).close()
        assert len(heard) == count
        with pytest.raises(_core.InvalidArgumentError, match="debug, info or warning"):
            _core.set_log_callback(None, "loud")
    finally:
        forward_core_log.cache_clear()
        forward_core_log()

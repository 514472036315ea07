"""The options of the command line are the arguments that Python takes."""

import inspect
from dataclasses import fields

import pytest

from effinfer import LLM, SamplingParams
from effinfer.cli import chat, generate, measure
from effinfer.cli import options as o


def defaults(call) -> dict[str, object]:
    return {name: p.default for name, p in inspect.signature(call).parameters.items()}


def test_engine_options_are_arguments_of_llm():
    of_llm = defaults(LLM)
    for field in fields(o.EngineOptions):
        assert field.name in of_llm
        if field.name != "model":
            assert field.default == of_llm[field.name]


def test_sampling_options_are_fields_of_sampling_params():
    names = {field.name for field in fields(SamplingParams)}
    assert {field.name for field in fields(o.SamplingOptions)} <= names
    given = o.SAMPLING.given()
    assert SamplingParams(**given) == SamplingParams()
    assert "temperature" not in given  # that is the model's to say


@pytest.mark.parametrize(
    "command", [generate.generate, chat.chat, measure.bench, measure.perplexity]
)
def test_every_command_that_runs_a_model_takes_them(command):
    taken = set(defaults(command))
    engine = {field.name for field in fields(o.EngineOptions)}
    decided = {
        measure.bench: {"max_seq_len"},
        measure.perplexity: {"max_seq_len", "speculation"},
    }.get(command, set())
    assert engine - taken == decided
    assert not taken & {"engine", "sampling"}


def test_a_command_may_have_defaults_of_its_own():
    assert defaults(generate.generate)["max_tokens"] == 128
    assert defaults(chat.chat)["max_tokens"] == 1024
    for name in ("temperature", "top_k", "top_p", "min_p"):  # one rule for both
        assert defaults(chat.chat)[name] is defaults(generate.generate)[name] is None

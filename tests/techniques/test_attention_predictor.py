"""AttentionPredictor and TokenSelect's reuse in an engine: what a plane holds, and what is
refused. tests/cpp/test_history_index.cpp and test_kept_choice.cpp have the lists."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import effinfer
from effinfer import LLM, SamplingParams, Speculation, _core
from effinfer.checkpoints.model_files import open_model
from effinfer.techniques import AttentionPredictor, SnapKV, SuffixDecoding, TokenSelect
from tests.reference import tiny
from tests.techniques.contract_model import long_model
from tests.techniques.predictor_file import network_of_the_contract, write_network
from tests.techniques.watching import watching

CONFIG = tiny.FAMILIES["llama"]
FEW = {"budget": 256, "min_tokens": 0, "skip_layers": 0}
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
ROWS, NEXT, ALL, WHOLE = 32, 32, 33, 34  # csrc/ops/history_index.h


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return long_model(tmp_path_factory)


def prompt_of(count: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(count).integers(0, 200, count).tolist()
    return tokens


def method(**fields: Any) -> AttentionPredictor:
    return replace(AttentionPredictor(**FEW, path=network_of_the_contract()), **fields)


def text(path: Any, *techniques: Any, prompt: int = 500) -> list[int]:
    llm = LLM(path, techniques=list(techniques), threads=1)
    ids: list[int] = llm.generate([prompt_of(prompt)], GREEDY)[0].token_ids
    return ids


def test_where_each_token_visits_all_keys_it_is_dense_attention(path):
    assert text(path, method(every=1)) == text(path)
    assert text(path, method(every=8)) != text(path)


def test_a_plane_holds_the_history_of_generated_tokens(path):
    seen: list[tuple[int, np.ndarray]] = []

    def look(sequence: Any) -> None:
        seen.append((sequence.length, sequence.plane("attention_predictor").copy()))

    text(path, method(every=5), watching(look, when="every", tokens=1))
    start = 500  # the first generated token's place
    rows = [(length, plane) for length, plane in seen if length > start]
    assert len(rows) > 20
    for length, plane in rows:
        heads = plane.reshape(len(plane), -1)
        np.testing.assert_array_equal(heads[:, NEXT], length)
        np.testing.assert_array_equal(heads[:, ALL], start + (length - 1 - start) // 5 * 5)
        np.testing.assert_array_equal(heads[:, WHOLE], (length - 1) // 64)
        last = heads[:, (length - 1) % ROWS :: 64][:, : (length - 1) // 64]
        assert (last >= 0).all()
        assert (last < 14.001).all()
        assert (last.max(-1) > 14 - 10).all()  # of fewer than 2^10 keys one has an equal share


def test_its_requests_are_not_drafted_for(path):
    """A prompt that repeats itself, of which there is much to draft."""
    prompt, drafting = prompt_of(40) * 10, Speculation([SuffixDecoding()], controller=8)
    for chosen in (TokenSelect(**FEW), method(), TokenSelect(**FEW, reuse=0.5)):
        llm = LLM(path, techniques=[chosen], speculation=drafting, threads=1)
        output = llm.generate([prompt], GREEDY)[0]
        plain = LLM(path, techniques=[chosen], threads=1).generate([prompt], GREEDY)[0]
        assert output.token_ids == plain.token_ids
        drafted = output.metrics.speculation.drafted
        assert (drafted > 0) == (chosen == TokenSelect(**FEW))


def test_a_choice_that_serves_no_row_changes_no_text(path):
    """No cosine is above 1; above 0 some are."""
    counts: list[np.ndarray] = []

    def look(sequence: Any) -> None:
        counts.append(sequence.plane("token_select").reshape(18 // 3, -1)[:, 4:6].sum(0))

    watch = watching(look, when="every", tokens=8)
    plain = text(path, TokenSelect(**FEW))
    assert text(path, TokenSelect(**FEW, reuse=1.0), watch) == plain
    assert counts[-1][0] > 90
    assert counts[-1][1] == 0
    assert text(path, TokenSelect(**FEW, reuse=1e-6), watch) != plain
    assert counts[-1][1] > 30


def test_networks_of_something_else_are_refused(path, tmp_path):
    error = effinfer.InvalidArgumentError
    with pytest.raises(error, match=r"\[AttentionPredictor\] path: expected the file of a network"):
        LLM(path, techniques=[AttentionPredictor()])
    for key, value in (("kind", "token_butler"), ("hidden_size", 32), ("vocab_size", 7)):
        file = tmp_path / f"{key}.gguf"
        write_network(file, CONFIG, {key: value})
        with pytest.raises(error, match=rf"\[heads\] {re.escape(str(file))}: expected {key}"):
            LLM(path, techniques=[method(path=str(file))])
    with pytest.raises(effinfer.FileError):
        LLM(path, techniques=[method(path=str(tmp_path / "nothing.gguf"))])


def test_methods_that_drop_keys_are_refused_beside_it(path):
    with pytest.raises(effinfer.ConflictError, match="kv.resident"):
        LLM(path, techniques=[method(), SnapKV()])


@pytest.mark.parametrize(
    ("of", "name", "value"),
    [
        (method(), "every", "0"),
        (method(), "plane", '""'),
        (method(), "keys", "-1"),
        (method(), "share", "1.5"),
        (TokenSelect(**FEW, reuse=0.5), "plane", '""'),
        (TokenSelect(**FEW, reuse=0.5), "reuse", "0.0"),
        (TokenSelect(**FEW, reuse=0.5), "reuse", "1.5"),
    ],
)
def test_wrong_nodes_are_refused(path, of, name, value):
    graph = of.graph(open_model(path).graph).to_string()
    assert _core.Graph.parse(graph).to_string() == graph
    wrong, count = re.subn(rf"\b{name} = ([^,}}]+)", f"{name} = {value}", graph)
    assert count > 0
    with pytest.raises(_core.FormatError, match="plane|reuse" if name == "reuse" else name):
        _core.Graph.parse(wrong).verify()


def test_explain_says_what_is_kept(path):
    said = LLM(path, techniques=[method()]).explain()
    assert "[history_index] every=16 plane=attention_predictor unit=64 keys=64" in said
    assert "reuse=0.5" in LLM(path, techniques=[TokenSelect(**FEW, reuse=0.5)]).explain()

"""Models that run other layers than all of theirs in a row, or otherwise: EasySpec, Unified Layer
Skipping, SkipDecode, FiRST, MLKV, LongGen. Silent layers tell what is right: leaving them out
changes no bit."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import effinfer
from effinfer import SamplingParams, _core
from effinfer.checkpoints.model_files import ModelFiles, open_model
from effinfer.techniques import (
    MLKV,
    EarlyExit,
    EasySpec,
    FiRST,
    LongGen,
    SkipDecode,
    SkipLayers,
    UnifiedSkip,
)
from effinfer.techniques.graph_steps import GraphSteps
from effinfer.techniques.layer_routers import LayerRouters
from effinfer.techniques.layers import num_layers
from effinfer.testing import make_model, make_twin
from tests.model_files import smollm2_path
from tests.reference import tiny
from tests.reference.decoder import Decoder

TOKENS = np.random.default_rng(3).integers(3, 250, 40).tolist()
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
PROSE = (Path(__file__).parents[2] / "docs/speculation.md").read_text()


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model of two layers, and the same with four silent ones behind them."""
    folder = tmp_path_factory.mktemp("models")
    model = make_model("llama-tiny", folder / "model.gguf")
    return model, make_twin(model, folder / "twin.gguf", depth=3)


def logits_of(files: ModelFiles, graph: _core.Graph) -> np.ndarray:
    steps = GraphSteps.of(files, graph, 128)
    return steps.feed(steps.begin(), TOKENS, rows=len(TOKENS))


def silenced(files: ModelFiles, layers: set[int]) -> ModelFiles:
    """The model whose `layers` add nothing to the stream."""
    weights = _core.LayeredWeights(files.weights)
    ends = {"attn_output", "ffn_down", "post_attention_norm", "post_ffw_norm"}
    text = files.graph.to_string()
    for name in files.graph.weight_names:
        parts = name.split(".")
        if parts[0] != "blk" or int(parts[1]) not in layers or parts[2] not in ends:
            continue
        shape, dtype = list(files.weights.shape(name)), files.weights.dtype(name)
        values = np.zeros(shape, np.float32)
        data, _ = (values, 0) if dtype == "f32" else _core.quantize(dtype, values)
        weights.add(name, data, dtype, shape)
    return replace(files, weights=weights, graph=_core.Graph.parse(text))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_layers_behind_silent_ones_may_read_the_same_input(name: str, tmp_path: Path) -> None:
    files = open_model(tiny.write_gguf(tiny.FAMILIES[name], tmp_path / "model.gguf"))
    count = num_layers(files.graph)
    # Groups of two from layer 1: where the first of each adds nothing, both read the same anyway.
    firsts = {layer for layer in range(1, count, 2) if layer + 1 < count}
    fuzzy = EasySpec(group=2, first=1).apply(files.graph)
    quiet = silenced(files, firsts)
    np.testing.assert_array_equal(logits_of(quiet, fuzzy), logits_of(quiet, files.graph))
    assert not np.array_equal(logits_of(files, fuzzy), logits_of(files, files.graph))
    alone = EasySpec(group=1).apply(files.graph)
    np.testing.assert_array_equal(logits_of(files, alone), logits_of(files, files.graph))
    for wrong in ({"group": 0}, {"group": count + 1}, {"first": 0}, {"first": 1.5}):
        with pytest.raises(effinfer.InvalidArgumentError, match=r"\[EasySpec\] (group|first): exp"):
            EasySpec(**wrong).apply(files.graph)


def test_what_is_skipped_is_spread_evenly() -> None:
    for count, speedup, kept in [(30, 1.0, 30), (30, 1.5, 20), (30, 2.0, 15), (18, 1.2, 15)]:
        skipped = UnifiedSkip(speedup).skipped(count)
        running = [layer for layer in range(count) if layer not in skipped]
        assert len(running) == kept
        assert running[0] == 0
        assert running[-1] == count - 1
        gaps = np.diff(running)
        assert gaps.max() - gaps.min() <= 1
    assert UnifiedSkip(100).skipped(6) == [1, 2, 3, 4]
    assert UnifiedSkip(100).skipped(1) == []
    for wrong in (0.5, float("nan")):
        with pytest.raises(effinfer.InvalidArgumentError, match="speedup: expected 1 or more"):
            UnifiedSkip(wrong).skipped(30)


def test_an_llm_runs_the_layers_that_it_is_given(twin: tuple[Path, Path]) -> None:
    model, deep = twin
    with effinfer.LLM(model) as plain, effinfer.LLM(deep, layers=EarlyExit(2)) as short:
        np.testing.assert_array_equal(short.logits(TOKENS), plain.logits(TOKENS))
        expected = plain.generate([TOKENS], GREEDY)[0].token_ids
        assert short.generate([TOKENS], GREEDY)[0].token_ids == expected
        assert short.engine.packed_bytes == plain.engine.packed_bytes
    for wrong in (3, EarlyExit, "skip"):
        with pytest.raises(effinfer.InvalidArgumentError, match=r"\[LLM\] layers: expected"):
            effinfer.LLM(model, layers=wrong)
    with pytest.raises(effinfer.InvalidArgumentError, match=r"layers of 0\.\.1, got 2"):
        effinfer.LLM(model, layers=SkipLayers([2]))


def test_fewer_layers_of_a_real_model_predict_worse_by_and_by() -> None:
    losses = []
    for speedup in (1.0, 1.07, 1.5):
        with effinfer.LLM(smollm2_path(), layers=UnifiedSkip(speedup), max_seq_len=512) as llm:
            ids = llm.tokenize(PROSE)[:256]
            losses.append(-llm.log_likelihoods(ids).mean())
    assert losses[0] < losses[1] < losses[0] + 1.5
    assert losses[1] < losses[2]


def test_layers_go_as_a_text_gets_longer(twin: tuple[Path, Path]) -> None:
    model, deep = twin
    with effinfer.LLM(model) as llm:
        expected = llm.generate([TOKENS], GREEDY)[0].token_ids
    decoder = SkipDecode(deep, least=2, first=2, span=16, stride=1, max_seq_len=512)
    output = decoder.generate(TOKENS, GREEDY)
    assert output.token_ids == expected  # what goes is silent
    assert output.finish_reason == "length"
    counts = [6 - len(decoder.skipped(position)) for position in range(40)]
    assert counts == sorted(counts, reverse=True)
    assert (counts[0], counts[8], counts[16], counts[39]) == (6, 4, 2, 2)
    assert output.layers == pytest.approx(np.mean(counts[:39]))
    files = open_model(model)
    steps = GraphSteps.of(files, files.graph, 512)
    text, fresh, scores = steps.begin(), TOKENS, []
    for token in expected:
        row = steps.feed(text, fresh)[0].astype(np.float64)
        scores.append(row[token] - np.logaddexp.reduce(row))
        fresh = [token]
    found = decoder.log_likelihoods(TOKENS, expected)
    np.testing.assert_allclose(found, scores, rtol=0, atol=1e-9)
    # All pages come back, and the next text begins with all layers.
    assert decoder.generate(TOKENS, GREEDY).token_ids == expected
    # Layers that say something are missed.
    lossy = SkipDecode(model, least=1, first=0, span=4, stride=1, max_seq_len=512)
    missed = lossy.log_likelihoods(TOKENS, expected)
    np.testing.assert_allclose(missed[:3], scores[:3], rtol=0, atol=1e-9)
    assert not np.allclose(missed[5:], scores[5:], rtol=0, atol=1e-3)


def test_a_decoder_of_layers_samples_stops_and_refuses(twin: tuple[Path, Path]) -> None:
    model, deep = twin
    decoder = SkipDecode(deep, least=2, first=2, max_seq_len=128)
    params = SamplingParams(temperature=0.9, seed=7, max_tokens=20, ignore_eos=True)
    with effinfer.LLM(model) as llm:
        expected = llm.generate([TOKENS], params)[0].token_ids
    assert decoder.generate(TOKENS, params).token_ids == expected
    stopped = decoder.generate(TOKENS, params, stop_token_ids=[expected[4]])
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == expected[: expected.index(expected[4]) + 1]
    with pytest.raises(effinfer.InvalidArgumentError, match="one answer"):
        decoder.generate(TOKENS, n=2)
    with pytest.raises(effinfer.InvalidArgumentError, match="expected some text"):
        decoder.generate([])
    with pytest.raises((effinfer.OutOfMemoryError, effinfer.InvalidArgumentError)):
        decoder.generate(TOKENS, GREEDY, max_tokens=500)
    assert decoder.generate(TOKENS, params).token_ids == expected
    for wrong in ({"least": 1, "first": 2}, {"least": 2, "span": 0}, {"least": 3, "stride": 1.5}):
        with pytest.raises(effinfer.InvalidArgumentError, match=r"\[SkipDecode\]"):
            SkipDecode(deep, **{"first": 1, **wrong})


def test_routers_learn_which_layers_are_worth_nothing(twin: tuple[Path, Path]) -> None:
    model, deep = twin
    rng = np.random.default_rng(8)
    examples = [rng.integers(3, 290, 24).tolist() for _ in range(6)]
    first = FiRST(deep, skip=3, answer=8, max_seq_len=256)
    with pytest.raises(effinfer.InvalidArgumentError, match=r"routers: expected fit\(\)"):
        first.generate(TOKENS, GREEDY)
    first.fit(examples)
    with effinfer.LLM(model) as llm:
        expected = llm.generate([TOKENS], GREEDY)[0].token_ids
    output = first.generate(TOKENS, GREEDY)
    # Of the inner layers 1 to 4 the last three are silent.
    assert sorted(first.skipped(0)) == [2, 3, 4]
    assert output.token_ids == expected
    assert output.layers == 3
    _, costs = first.measure(examples[0])
    assert costs[0] != 0
    assert costs[1:] == [0, 0, 0]
    for wrong in ([], [[5] * 8]):
        with pytest.raises(effinfer.InvalidArgumentError, match="examples: expected some"):
            first.fit(wrong)
    with pytest.raises(effinfer.InvalidArgumentError, match="skip: expected at least 0"):
        FiRST(deep, skip=-1)


def test_routers_follow_the_prompt() -> None:
    """Costs that are a linear function of the states come back, and flatten with the ridge."""
    rng = np.random.default_rng(2)
    states = rng.standard_normal((40, 3, 6))
    weights = rng.standard_normal((3, 6))
    costs = (states * weights).sum(2)
    routers = LayerRouters.fit(states, costs, 1e-9)
    np.testing.assert_allclose(routers.weights, weights, atol=1e-6)
    np.testing.assert_allclose(routers.costs(states[5]), costs[5], atol=1e-6)
    flat = LayerRouters.fit(states, costs, 1e6)
    assert np.abs(flat.weights).max() < 0.01
    with pytest.raises(effinfer.InvalidArgumentError, match="ridge: expected more than 0"):
        LayerRouters.fit(states, costs, 0.0)


@pytest.mark.parametrize("group", [2, 3])
def test_mlkv_shares_the_keys_of_a_groups_first_layer(twin, group):
    """Beside a reference whose other layers take what that one's projections gave."""

    class Shared(Decoder):
        def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
            _, layer, kind = name.split(".")
            if kind not in ("attn_k", "attn_v"):
                return super().linear(x, name)
            if int(layer) % group == 0:
                made[kind] = super().linear(x, name)
            return made[kind]

    made: dict[str, torch.Tensor] = {}
    expected = Shared.from_gguf(twin[1]).logits(TOKENS).numpy()
    llm = effinfer.LLM(twin[1], layers=MLKV(group), precision="f32", kv_dtype="f32", threads=1)
    plain = effinfer.LLM(twin[1], precision="f32", kv_dtype="f32", threads=1)
    np.testing.assert_allclose(llm.logits(TOKENS), expected, atol=2e-3)
    assert np.abs(plain.logits(TOKENS) - expected).max() > 0.1
    sizes = [each.engine.kv_cache.num_bytes for each in (llm, plain)]
    pages = [each.engine.kv_cache.num_pages for each in (llm, plain)]
    assert sizes[0] * pages[1] * group == sizes[1] * pages[0]


def test_mlkv_in_groups_of_one_is_the_model(twin):
    texts = [
        effinfer.LLM(twin[1], layers=layers, threads=1).generate([TOKENS], GREEDY)[0].token_ids
        for layers in (None, MLKV(1))
    ]
    assert texts[0] == texts[1]


def test_mlkv_refuses_what_it_cannot_share(tmp_path):
    with pytest.raises(effinfer.InvalidArgumentError, match=r"\[MLKV\] group: expected at least 1"):
        MLKV(0).apply(open_model(make_model("llama-tiny", tmp_path / "m.gguf")).graph)
    gemma = tiny.write_gguf(tiny.FAMILIES["gemma3"], tmp_path / "gemma.gguf")
    with pytest.raises(
        effinfer.UnsupportedError, match=r"\[MLKV\] .*expected layers of one window"
    ):
        MLKV(2).apply(open_model(gemma).graph)


@pytest.mark.parametrize(("share", "full"), [(1 / 3, {2, 3}), (0.5, {1, 2, 3}), (0.0, set())])
@pytest.mark.parametrize("sinks", [0, 3])
def test_longgen_sees_all_keys_in_the_middle(twin, share, full, sinks):
    """Beside a reference whose outer layers hide all but the first and the newest keys."""

    class Windowed(Decoder):
        def unseen(self, tokens: int, layer: int) -> torch.Tensor:
            position = torch.arange(tokens)
            far = position[:, None] - position[None, :] >= 7
            far &= position[None, :] >= sinks
            hidden = super().unseen(tokens, layer)
            return hidden if layer in full else hidden | far

    expected = Windowed.from_gguf(twin[1]).logits(TOKENS).numpy()
    layers = LongGen(window=7, sinks=sinks, share=share)
    exact = {"precision": "f32", "kv_dtype": "f32", "threads": 1}
    llm = effinfer.LLM(twin[1], layers=layers, **exact)
    np.testing.assert_allclose(llm.logits(TOKENS), expected, atol=2e-3)
    assert np.abs(effinfer.LLM(twin[1], **exact).logits(TOKENS) - expected).max() > 0.1


def kv_bytes(layers: LongGen | None) -> int:
    """Of SmolLM2's keys and values behind 1,200 tokens."""
    llm = effinfer.LLM(
        smollm2_path(), layers=layers, max_seq_len=1300, prefix_cache=False, threads=1
    )
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    request = llm.engine.add(llm.tokenize(PROSE)[:1200], params.to_core())
    while not any(output.tokens for output in llm.engine.step()):
        pass
    used: int = llm.engine.kv_cache.used_bytes
    llm.engine.cancel(request)
    return used


def test_longgen_frees_what_windows_leave_behind():
    dense = kv_bytes(None)
    assert kv_bytes(LongGen(window=64)) < 0.45 * dense
    assert kv_bytes(LongGen(window=64, sinks=4)) == dense


def test_longgen_at_its_limits_is_the_model(twin):
    texts = [
        effinfer.LLM(twin[1], layers=layers, threads=1).generate([TOKENS], GREEDY)[0].token_ids
        for layers in (None, LongGen(share=1.0, window=1), LongGen(window=100))
    ]
    assert texts[0] == texts[1] == texts[2]


def test_longgen_refuses_what_it_cannot_do(tmp_path):
    graph = open_model(make_model("llama-tiny", tmp_path / "m.gguf")).graph
    for wrong in ({"window": 0}, {"sinks": -1}, {"share": 1.5}, {"share": float("nan")}):
        (name,) = wrong
        with pytest.raises(effinfer.InvalidArgumentError, match=rf"\[LongGen\] {name}: expected"):
            LongGen(**wrong).apply(graph)
    gemma = tiny.write_gguf(tiny.FAMILIES["gemma3"], tmp_path / "gemma.gguf")
    with pytest.raises(effinfer.UnsupportedError, match=r"expected layers without a window"):
        LongGen().apply(open_model(gemma).graph)

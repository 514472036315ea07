"""Profiles of an engine's steps: what is recorded, and that recording changes nothing."""

import numpy as np
import pytest

from effinfer import _core
from effinfer._core import SamplingParams
from effinfer.checkpoints.model_files import open_model
from tests.reference import tiny

pytestmark = pytest.mark.alone

TOKENS = 8


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    path = tiny.write_gguf(tiny.FAMILIES["llama"], tmp_path_factory.mktemp("models") / "tiny.gguf")
    model = open_model(path)
    return _core.Engine(model.graph, model.weights, _core.ThreadPool(2), prefix_cache=False)


def generate(engine, sizes):
    """Greedy tokens of a batch of prompts of these sizes."""
    rng = np.random.default_rng(4)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    ids = [engine.add(rng.integers(0, 256, size), params) for size in sizes]
    tokens = {i: [] for i in ids}
    while engine.has_work():
        for output in engine.step():
            assert output.error == ""
            tokens[output.request] += output.token_ids
    return [tokens[i] for i in ids]


def test_a_recorded_step_computes_the_same(engine):
    plain = generate(engine, [20, 33])
    engine.start_profile(100)
    recorded = generate(engine, [20, 33])
    assert recorded == plain
    profile = engine.take_profile()
    prefill, decode = (profile.summary(phase) for phase in ("prefill", "decode"))
    assert (prefill["steps"], prefill["tokens"]) == (1, 53)
    assert (decode["steps"], decode["tokens"]) == (TOKENS - 1, 2 * (TOKENS - 1))
    assert profile.num_steps == TOKENS and profile.dropped_steps == 0


def test_a_batch_reads_the_weights_once(engine):
    """Of a matmul, operations grow with the batch, and bytes by the activations alone."""
    rows = {}
    for count in (1, 8):
        engine.start_profile(100)
        generate(engine, [5] * count)
        kernels = engine.take_profile().summary("decode")["kernels"]
        (rows[count],) = (row for row in kernels if "ffn_gate" in row["what"])
    assert rows[8]["calls"] == rows[1]["calls"]
    assert rows[8]["ops"] == 8 * rows[1]["ops"]
    assert rows[1]["bytes"] < rows[8]["bytes"] < 2 * rows[1]["bytes"]


def test_what_does_not_fit_is_counted(engine):
    engine.start_profile(3)
    generate(engine, [10])
    profile = engine.take_profile()
    assert (profile.num_steps, profile.dropped_steps) == (3, TOKENS - 3)
    assert engine.take_profile().num_steps == 0  # none was started


def test_wrong_arguments(engine):
    with pytest.raises(_core.InvalidArgumentError, match="max_steps"):
        engine.start_profile(0)
    with pytest.raises(_core.OutOfMemoryError, match="records"):
        engine.start_profile(1 << 60)
    with pytest.raises(_core.InvalidArgumentError, match="phase"):
        engine.take_profile().summary("verify")
    with pytest.raises(_core.InvalidArgumentError, match="int4"):
        _core.measure_peak_ops(_core.ThreadPool(1), "int4", "avx2")

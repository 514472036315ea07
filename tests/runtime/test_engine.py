"""The engine on tiny models: a request's tokens depend on the request alone."""

import numpy as np
import pytest

from effinfer import _core
from effinfer._core import SamplingParams
from effinfer.checkpoints.model_files import open_model
from tests.reference import tiny

MODES = {
    "f32": {"precision": "f32"},
    "deterministic": {"deterministic": True},
    "fast": {},
}


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return open_model(tiny.write_gguf(tiny.FAMILIES[request.param], folder / "tiny.gguf"))


def make_engine(model, **options):
    return _core.Engine(model.graph, model.weights, _core.ThreadPool(2), **options)


def requests(count=8):
    """Ragged prompts, two of which begin alike, some sampled."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 256, size) for size in rng.integers(1, 100, count)]
    prompts[3] = np.concatenate([prompts[1], prompts[3]])[:150]
    params = [
        SamplingParams(
            temperature=0.8 * (i % 2), seed=i, max_tokens=10 + 10 * i, ignore_eos=True, top_p=0.9
        )
        for i in range(count)
    ]
    return list(zip(prompts, params, strict=True))


def run(engine, asks):
    ids = [engine.add(prompt, params) for prompt, params in asks]
    tokens = {i: [] for i in ids}
    while engine.has_work():
        for output in engine.step_many(max_seconds=0.01):
            assert output.error == ""
            tokens[output.request] += output.token_ids
        engine.kv_cache.check_integrity()
    return [tokens[i] for i in ids]


@pytest.fixture(scope="module")
def alone(model):
    """Each request in an engine of its own that nobody used before."""
    texts = {}
    for mode, options in MODES.items():
        engine = make_engine(model, prefix_cache=False, **options)
        texts[mode] = [run(engine, [ask])[0] for ask in requests()]
        assert [len(t) for t in texts[mode]] == [p.max_tokens for _, p in requests()]
    return texts


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batch_tokens": 7},
        {"max_batch_tokens": 64, "max_sequences": 3},
        {"num_pages": 4},
        {"num_pages": 4, "prefix_cache": False},
    ],
    ids=str,
)
def test_texts_do_not_depend_on_who_is_served(model, alone, mode, options):
    engine = make_engine(model, **MODES[mode], **options)
    assert run(engine, requests()) == alone[mode]
    if "num_pages" in options:
        assert engine.stats()["preemptions"] > 0
    # Again, with prefixes of the first time in the cache: the prompts' own pages are reused.
    if mode != "fast":
        assert run(engine, requests()) == alone[mode]


@pytest.mark.parametrize("mode", MODES)
def test_logits_are_those_that_tokens_are_drawn_from(model, mode):
    engine = make_engine(model, **MODES[mode])
    prompt, params = requests()[2][0], SamplingParams(temperature=0.0, max_tokens=20)
    (output,) = run(engine, [(prompt, params)])
    sequence = np.concatenate([prompt, output])
    prefill = engine.logits(sequence)
    decode = engine.logits(sequence, phase="decode")
    assert prefill.shape == decode.shape == (len(sequence), tiny.VOCAB_SIZE)
    assert prefill.dtype == np.float32
    assert np.isfinite(prefill).all()
    first = len(prompt) - 1
    assert prefill[first].argmax() == output[0]
    if mode == "fast":
        # Operands of the two phases round differently, to 8 bits at worst, in every layer.
        assert np.abs(prefill - decode).max() <= 0.1 * np.abs(prefill).max()
    else:
        assert np.array_equal(prefill, decode)
        assert decode[first:-1].argmax(axis=1).tolist() == output


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_log_likelihoods_are_those_of_the_logits(model, mode, phase):
    engine = make_engine(model, **MODES[mode])
    tokens = requests()[2][0]
    logits = engine.logits(tokens, phase)[:-1].astype(np.float64)
    wide = logits - logits.max(axis=1, keepdims=True)
    expected = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    expected = expected[np.arange(len(tokens) - 1), tokens[1:]]
    scores = engine.log_likelihoods(tokens, phase)
    assert scores.dtype == np.float64
    # exp() in float32: a relative error of a few epsilon in each term, and so in their sum.
    np.testing.assert_allclose(scores, expected, rtol=0, atol=8 * np.finfo(np.float32).eps)
    assert engine.log_likelihoods(tokens[:1], phase).shape == (0,)
    with pytest.raises(_core.InvalidArgumentError, match="tokens"):
        engine.log_likelihoods([], phase)


def test_reused_prefixes_show_in_the_metrics(model):
    engine = make_engine(model, precision="f32")
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    prompt = np.arange(130)
    seen = []
    for _ in range(2):
        request = engine.add(prompt, params)
        while engine.has_work():
            engine.step()
        seen.append(engine.metrics(request)["cached_tokens"])
        engine.forget(request)
    assert seen == [0, 128]
    with pytest.raises(_core.InvalidArgumentError, match="no request"):
        engine.metrics(request)


def test_cancelled_requests_end_and_the_others_go_on(model, alone):
    engine = make_engine(model, precision="f32")
    asks = requests()
    ids = [engine.add(prompt, params) for prompt, params in asks]
    engine.step()
    engine.cancel(ids[-1])
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    ended = {o.request: o.finish_reason for o in outputs if o.finish_reason}
    assert ended == {i: "cancelled" if i == ids[-1] else "length" for i in ids}
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0


def test_token_ids_come_in_any_sequence_of_integers(model):
    engine = make_engine(model, precision="f32")
    expected = engine.logits([1, 2, 3])
    for ids in ((1, 2, 3), np.array([1, 2, 3], np.uint16), [np.int64(1), 2, 3]):
        np.testing.assert_array_equal(engine.logits(ids), expected)


def test_logprobs_come_with_the_tokens(model):
    engine = make_engine(model, precision="f32")
    engine.add([1, 2, 3], SamplingParams(temperature=0.0, logprobs=2, max_tokens=2))
    (output,) = engine.step()
    (sampled,) = output.tokens
    logits = engine.logits([1, 2, 3])[-1].astype(np.float64)
    assert np.isclose(sampled.logprob, logits.max() - np.log(np.exp(logits).sum()), rtol=1e-4)
    assert sampled.top[0] == (sampled.token, sampled.logprob)
    assert len(sampled.top) == 2


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"precision": "f8"}, "precision"),
        ({"kv_dtype": "q4_0"}, "dtype"),
        ({"max_seq_len": -1}, "max_seq_len"),
        ({"max_seq_len": 10**9}, "max_seq_len"),
        ({"num_pages": -3}, "num_pages"),
        ({"max_batch_tokens": 0}, "max_batch_tokens"),
        ({"max_sequences": 0}, "max_sequences"),
    ],
)
def test_bad_options_are_named(model, options, match):
    with pytest.raises(_core.Error, match=match):
        make_engine(model, **options)


def test_bad_requests_are_refused_and_harm_nobody(model, alone):
    engine = make_engine(model, precision="f32")
    params = SamplingParams(max_tokens=1)
    for prompt in ([], [tiny.VOCAB_SIZE], [-1], [1.5], [0] * engine.max_seq_len):
        with pytest.raises(_core.InvalidArgumentError, match="prompt"):
            engine.add(prompt, params)
    for prompt, match in (([2**31], "32-bit"), ([2**70], "integers"), ([[1]], "a sequence")):
        with pytest.raises(_core.InvalidArgumentError, match=match):
            engine.add(prompt, params)
    with pytest.raises(_core.InvalidArgumentError, match="stop_token_ids"):
        engine.add([1], SamplingParams(stop_token_ids=[tiny.VOCAB_SIZE]))
    with pytest.raises(_core.InvalidArgumentError, match="phase"):
        engine.logits([1], phase="both")
    assert not engine.has_work()
    assert run(engine, requests()[:2]) == alone["f32"][:2]

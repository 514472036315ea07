"""Whole executables: against a float64 oracle, with passes off, in chunks and in batches."""

import functools

import numpy as np
import pytest

from effinfer import _core
from tests.compiler.interpreter import evaluate
from tests.compiler.tiny_models import PAGE, VOCAB, Stepper, TinyModel, make_gemma, make_llama
from tests.tolerance import BF16_EPS, F32_EPS, SAFETY

OPTIONAL = [name for name in _core.pass_names() if name.startswith(("merge", "fuse", "hoist"))]
TOKENS = [int(t) for t in np.random.default_rng(3).integers(0, VOCAB, 70)]
# Every projection of another type: merged matmuls have parts of several.
MIXED = {
    "embed": "q8_0",
    "q": "q4_0",
    "k": "q8_0",
    "v": "q5_1",
    "o": "q4_1",
    "gate": "q4_1",
    "up": "q5_0",
    "down": "q8_0",
    "head": "q5_1",
    "norm": "f16",
    "q_bias": "bf16",
}
DENSE = {"embed": "f16", "q": "bf16", "k": "f16", "o": "bf16", "gate": "f16", "down": "bf16"}
MODELS = {
    "llama": lambda: make_llama(bias=True),
    "llama-mixed": lambda: make_llama(bias=True, **MIXED),
    "llama-glu": lambda: make_llama(activation="sigmoid"),
    "llama-dense": lambda: make_llama(**DENSE),
    "gemma-mixed": lambda: make_gemma(**MIXED),
    "gemma": lambda: make_gemma(),
}


@functools.cache
def model(name: str) -> TinyModel:
    return MODELS[name]()


@functools.cache
def oracle(name: str) -> np.ndarray:
    return evaluate(model(name).graph, model(name).exact, TOKENS)


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


# A row passes 2 layers of about 7 roundings that matter, each growing like the square root of the
# longest sum (160 products); post-norms can magnify what is left after a sum cancels.
def allowed(eps: float) -> float:
    return SAFETY * eps * np.sqrt(2 * 7 * 160)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_float32_against_the_oracle(name, phase, isa):
    executable = model(name).compile(precision="f32")
    logits = Stepper(executable).feed(TOKENS, 33, phase)
    assert relative_error(logits, oracle(name)) < allowed(F32_EPS)


@pytest.mark.parametrize("name", ["llama-mixed", "gemma-mixed", "llama-dense"])
def test_fast_against_the_oracle(name, isa):
    executable = model(name).compile(kv_dtype="f32")
    decode = Stepper(executable).feed(TOKENS, 16, "decode")
    prefill = Stepper(executable).feed(TOKENS, 70, "prefill")
    # A step of int8 is 1 / 127 of a block's maximum, of bf16 2^-8 of the value; errors of
    # independent operands average out over the sums, so layers and not terms count.
    assert relative_error(decode, oracle(name)) < SAFETY * np.sqrt(2 * 4) / 127 / 2
    assert relative_error(prefill, oracle(name)) < SAFETY * np.sqrt(2 * 4) * BF16_EPS / 4


@pytest.mark.parametrize("precision", ["f32", "fast"])
@pytest.mark.parametrize("disabled", OPTIONAL)
@pytest.mark.parametrize("name", ["llama-mixed", "gemma-mixed"])
def test_a_pass_changes_nothing_but_speed(name, disabled, precision):
    everything = model(name).compile(precision=precision)
    without = model(name).compile(precision=precision, disabled_passes={disabled})
    assert str(without.graph) != str(everything.graph)
    assert [disabled, "off"] in [line.split() for line in without.explain().splitlines()]
    for phase in ("decode", "prefill"):
        expected = Stepper(everything).feed(TOKENS, 40, phase)
        actual = Stepper(without).feed(TOKENS, 40, phase)
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("name", ["llama-mixed", "llama-glu", "gemma"])
def test_without_any_optional_pass(name):
    plain = model(name).compile(precision="f32", disabled_passes=set(OPTIONAL))
    logits = Stepper(plain).feed(TOKENS, 70, "prefill")
    assert relative_error(logits, oracle(name)) < allowed(F32_EPS)
    assert {"rope", "kv_append", "to_act"} <= {node["op"] for node in plain.graph.nodes}


@pytest.mark.parametrize(
    ("options", "phases"),
    [
        ({"precision": "f32"}, ["prefill", "decode"]),
        ({"precision": "fast", "deterministic": True}, ["prefill", "decode"]),
        ({"precision": "fast"}, ["decode"]),
        ({"precision": "fast"}, ["prefill"]),
    ],
)
def test_chunks_and_phases_give_the_same_bits(options, phases):
    executable = model("gemma-mixed").compile(**options)
    expected = Stepper(executable).feed(TOKENS, 70, phases[0])
    for chunk in (1, 7, 64):
        for phase in phases:
            logits = Stepper(executable).feed(TOKENS, chunk, phase)
            np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize("precision", ["f32", "fast"])
def test_a_batch_gives_the_bits_of_each_alone(precision):
    executable = model("llama-mixed").compile(precision=precision)
    sequences = [TOKENS[:9], TOKENS[9:10], TOKENS[10:70]]
    alone = [Stepper(executable).feed(tokens, 5, "decode") for tokens in sequences]
    together = Stepper(executable, len(sequences))
    parts: list[list[np.ndarray]] = [[] for _ in sequences]
    rest = [list(tokens) for tokens in sequences]
    sizes = np.random.default_rng(8)
    while any(rest):
        step = {}
        for i, tokens in enumerate(rest):
            count = int(sizes.integers(1, 20))
            if tokens:
                step[i], rest[i] = tokens[:count], tokens[count:]
        for i, logits in zip(step, together.step(step, "decode"), strict=True):
            parts[i].append(logits)
    for mine, expected in zip(parts, alone, strict=True):
        np.testing.assert_array_equal(np.concatenate(mine), expected)


def test_threads_change_nothing():
    expected = Stepper(model("llama-mixed").compile(threads=1)).feed(TOKENS, 20, "decode")
    for threads in (2, 3, 5):
        logits = Stepper(model("llama-mixed").compile(threads=threads)).feed(TOKENS, 20, "decode")
        np.testing.assert_array_equal(logits, expected)


def test_a_step_without_logits():
    stepper = Stepper(model("llama").compile(precision="f32"))
    expected = Stepper(model("llama").compile(precision="f32")).feed(TOKENS[:9], 9, "prefill")
    empty = stepper.executable.run(
        token_ids=TOKENS[:8],
        positions=list(range(8)),
        qo_indptr=[0, 8],
        kv_indptr=[0, 1],
        kv_indices=[0],
        kv_len=[8],
        logit_rows=[],
        cache=stepper.cache,
        phase="prefill",
    )
    assert empty.shape == (0, VOCAB)
    stepper.lengths[0] = 8
    np.testing.assert_array_equal(stepper.step({0: TOKENS[8:9]}, "prefill")[0], expected[8:])


BATCH = {
    "token_ids": [1, 2, 3],
    "positions": [0, 1, 2],
    "qo_indptr": [0, 2, 3],
    "kv_indptr": [0, 1, 2],
    "kv_indices": [0, 3],
    "kv_len": [2, 1],
    "logit_rows": [1, 2],
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": [1, 2, VOCAB]}, r"token_ids\[2\]: expected 0..100, got 101"),
        ({"token_ids": [1, -2, 3]}, r"token_ids\[1\]"),
        ({"token_ids": []}, "at least one token"),
        ({"token_ids": [1] * 97, "positions": [0] * 97}, "at most 96"),
        ({"positions": [0, 1]}, "positions: expected 3 entries"),
        ({"positions": [0, 1, -1]}, r"positions\[2\]"),
        ({"qo_indptr": [0, 2, 4]}, "qo_indptr: expected 0 first and 3 last"),
        ({"qo_indptr": [1, 2, 3]}, "qo_indptr: expected 0 first"),
        ({"qo_indptr": [0, 4, 3]}, "qo_indptr: expected it to never fall"),
        ({"qo_indptr": [0, 3]}, "qo_indptr: expected 3 entries"),
        ({"kv_indptr": [0, 1, 1]}, "kv_indptr: expected 0 first and 2 last"),
        ({"kv_indices": [0, 4]}, r"kv_indices\[1\]: expected 0..3, got 4"),
        ({"kv_indices": [-1, 0]}, r"kv_indices\[0\]"),
        ({"kv_len": [1, 1]}, r"kv_len\[0\]: expected 2 .*got 1"),
        ({"kv_len": [65, 1]}, r"kv_len\[0\]: expected at most 64 tokens on 1 pages"),
        ({"kv_len": [257, 1]}, r"to 256 \(max_seq_len\), got 257"),
        ({"kv_len": [2] * 5, "qo_indptr": [0] * 6}, "kv_len: expected at most 4 entries"),
        ({"logit_rows": [1, 3]}, r"logit_rows\[1\]: expected 0..2, got 3"),
        ({"logit_rows": [0] * 97}, "logit_rows: expected at most 96"),
    ],
)
def test_inconsistent_batches_are_refused(change, message):
    executable = model("llama").compile(precision="f32")
    cache = executable.make_cache(4)
    executable.run(**BATCH, cache=cache)
    with pytest.raises(_core.InvalidArgumentError, match=message):
        executable.run(**{**BATCH, **change}, cache=cache)


def test_a_cache_of_another_shape_is_refused():
    executable = model("llama").compile(precision="f32")
    for change in ({"num_layers": 1}, {"num_kv_heads": 1}, {"head_dim": 32}, {"dtype": "bf16"}):
        shape = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 16, "dtype": "f32", **change}
        cache = _core.KvCache(**shape, num_pages=4)
        with pytest.raises(_core.InvalidArgumentError, match="cache: expected 2 layers of 2 heads"):
            executable.run(**BATCH, cache=cache)


def test_weights_are_checked():
    tiny = model("llama")
    options = _core.CompileOptions()
    with pytest.raises(_core.InvalidArgumentError, match="weight embed: the graph needs it"):
        _core.compile(tiny.graph, _core.MemoryWeights(), _core.ThreadPool(1), options)
    other = make_llama(embed="q8_0")
    with pytest.raises(_core.InvalidArgumentError, match=r"weight embed: expected f32\[101, 96\]"):
        _core.compile(tiny.graph, other.source, _core.ThreadPool(1), options)


@pytest.mark.parametrize("option", ["max_tokens", "max_sequences", "max_rows", "max_seq_len"])
def test_options_are_checked(option):
    with pytest.raises(_core.InvalidArgumentError, match=option):
        model("llama").compile(**{option: -1})


def test_a_tied_head_is_packed_once():
    executable = model("llama-mixed").compile()
    report = executable.explain()
    rows = [line.split() for line in report.splitlines() if line.startswith("  embed ")]
    assert [row[2] for row in rows] == ["packed"]
    assert "from the packed head" in report
    assert executable.packed_bytes > 0
    assert f"arena: peak {executable.arena_bytes} bytes" in report
    assert executable.graph.metadata["arena_bytes"] == executable.arena_bytes


def test_explain_names_kernels_and_phases():
    report = model("gemma-mixed").compile(max_seq_len=2 * PAGE).explain()
    assert "calls of decode" in report
    assert "matmul" in report
    assert "glu=gelu_tanh" in report
    assert "rope_append" in report
    one = model("gemma-mixed").compile(precision="f32").explain()
    assert "calls of both phases" in one

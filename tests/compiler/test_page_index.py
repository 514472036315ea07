"""page_index in a graph: which pages generated tokens visit."""

from typing import Any

import numpy as np
import pytest

from effinfer import _core
from effinfer.techniques import Quest, XAttention
from tests.compiler.tiny_models import (
    HEAD_DIM,
    KV_HEADS,
    LAYERS,
    Stepper,
    TinyModel,
    make_gemma,
    make_llama,
)

TOKENS = np.random.default_rng(8).integers(0, 101, 250).tolist()
PROMPT = 240  # of pages 0 to 3; behind the first and before the two newest one is chosen from
STEPS = {"max_tokens": 256, "max_rows": 256}
NOTHING_CHOSEN = Quest(budget=192, min_tokens=0, skip_layers=0)
EVERYTHING = Quest(budget=256, min_tokens=0, skip_layers=0)


def sparse(model: TinyModel, method: Any) -> TinyModel:
    return TinyModel(method.graph(model.graph), model.source, model.exact)


def generated(model: TinyModel, rows: int = 1, dense: list[int] | None = None, **options: Any):
    """Logits of the tokens behind the prompt, which are fed in steps of `rows`."""
    stepper = Stepper(model.compile(**STEPS, **options))
    stepper.step({0: TOKENS[:PROMPT]}, "prefill")
    parts = [TOKENS[i : i + rows] for i in range(PROMPT, len(TOKENS), rows)]
    return np.concatenate([stepper.step({0: part}, "decode", dense)[0] for part in parts])


@pytest.mark.parametrize("precision", ["fast", "f32"])
def test_visiting_everything_is_dense_attention(isa, precision):
    model = make_llama(q="q8_0", k="q8_0", v="q8_0")
    expected = generated(model, precision=precision)
    actual = generated(sparse(model, EVERYTHING), precision=precision)
    np.testing.assert_array_equal(actual, expected)
    chosen = generated(sparse(model, NOTHING_CHOSEN), precision=precision)
    assert (chosen != expected).any(-1).all()


def test_rows_choose_alike_however_many_share_a_step(isa):
    model = sparse(make_llama(), NOTHING_CHOSEN)
    expected = generated(model)
    for rows in (2, 3, 10):
        np.testing.assert_array_equal(generated(model, rows), expected)


def test_passes_and_threads_change_no_bits():
    model = sparse(make_llama(q="q4_0", k="q8_0", v="q8_0"), NOTHING_CHOSEN)
    expected = generated(model)
    names = ["fuse_rope_append", "fuse_regions", "fuse_attention"]
    for disabled in ([], *([name] for name in names), names):
        actual = generated(model, disabled_passes=set(disabled), threads=3)
        np.testing.assert_array_equal(actual, expected)


def test_what_is_chosen_depends_on_its_own_sequence():
    model = sparse(make_llama(), NOTHING_CHOSEN)
    expected = generated(model)
    both = Stepper(model.compile(max_tokens=512, max_rows=512), 2)
    both.step({0: TOKENS[:PROMPT], 1: TOKENS[30:]}, "prefill")
    for i, token in enumerate(TOKENS[PROMPT:]):
        actual = both.step({1: [i], 0: [token]}, "decode")[1]
        np.testing.assert_array_equal(actual, expected[i : i + 1])


def test_a_dense_sequence_has_the_bits_of_a_graph_without_an_index():
    model = make_llama()
    actual = generated(sparse(model, NOTHING_CHOSEN), dense=[1])
    np.testing.assert_array_equal(actual, generated(model))


def test_blocks_of_prompts_and_generated_rows_have_lists_of_their_own():
    model = make_llama()
    prompts = XAttention(min_tokens=0, threshold=0.3, stride=4)

    def last(methods: list[Any]) -> tuple[np.ndarray, np.ndarray]:
        stepper = Stepper(sparse_all(model, methods).compile(**STEPS))
        prompt = stepper.step({0: TOKENS[:PROMPT]}, "prefill")[0]
        return prompt, stepper.step({0: TOKENS[PROMPT : PROMPT + 1]}, "decode")[0]

    def sparse_all(model: TinyModel, methods: list[Any]) -> TinyModel:
        for method in methods:
            model = sparse(model, method)
        return model

    both, alone = last([prompts, NOTHING_CHOSEN]), last([prompts])
    np.testing.assert_array_equal(both[0], alone[0])
    assert (both[1] != alone[1]).any()
    limit = last([prompts, EVERYTHING])
    np.testing.assert_array_equal(limit[1], alone[1])


def test_an_index_is_for_its_heads():
    model = make_llama()
    text = sparse(model, NOTHING_CHOSEN).graph.to_string()

    def logits(only: str) -> np.ndarray:
        graph = _core.Graph.parse(text.replace("only = []", f"only = {only}"))
        return generated(TinyModel(graph, model.source, model.exact))

    expected = logits("[]")
    np.testing.assert_array_equal(logits("[0, 1]"), expected)
    assert (logits("[0]") != expected).any()
    assert (logits("[0]") != generated(model)).any()


def test_layers_with_windows_stay_as_they_are():
    assert "page_index" not in Quest().graph(make_gemma().graph).to_string()


def test_first_layers_are_skipped():
    def indices(skipped: int) -> int:
        graph = Quest(skip_layers=skipped).graph(make_llama().graph)
        return graph.to_string().count("= page_index(")

    assert [indices(n) for n in (0, 1, 9)] == [LAYERS, LAYERS - 1, 0]


def test_a_cache_without_bounds_is_refused():
    executable = sparse(make_llama(), EVERYTHING).compile()
    shape = {"num_layers": LAYERS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
    stepper = Stepper(executable)
    stepper.cache = _core.KvCache(**shape, num_pages=4)
    with pytest.raises(_core.InvalidArgumentError, match="cache: expected one that keeps bounds"):
        stepper.step({0: [1, 2]}, "decode")
    stepper = Stepper(executable)
    stepper.cache = _core.KvCache(**shape, num_pages=4, page_bounds=True)
    assert np.isfinite(stepper.step({0: [1, 2]}, "decode")[0]).all()


def test_bounds_take_a_small_share_of_the_cache():
    shape = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 64, "num_pages": 100}
    for dtype in ("f32", "f16", "bf16", "i8"):
        plain = _core.KvCache(**shape, dtype=dtype).num_bytes
        with_bounds = _core.KvCache(**shape, dtype=dtype, page_bounds=True).num_bytes
        assert 0 < with_bounds - plain < 0.04 * plain


def test_explain_names_the_index_and_the_limits():
    text = sparse(make_llama(), Quest(budget=512, skip_layers=0)).compile().explain()
    assert "page_index" in text
    assert "pages=5" in text
    assert "all keys: rows of prompts, or of fewer than 2048 keys" in text


@pytest.mark.parametrize(
    ("name", "value"),
    [("pages", -1), ("share", 1.5), ("sink_tokens", -1), ("min_tokens", -1), ("only", [2])],
)
def test_wrong_indices_are_refused(name, value):
    text = sparse(make_llama(), EVERYTHING).graph.to_string()
    before = {"pages": "pages = 1", "share": "share = 0.0", "only": "only = []"}
    old = before.get(name, f"{name} = {64 if name == 'sink_tokens' else 0}")
    assert old in text
    wrong = text.replace(old, f"{name} = {value}")
    with pytest.raises(_core.FormatError, match=name):
        _core.Graph.parse(wrong).verify()

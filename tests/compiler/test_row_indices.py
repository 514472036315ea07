"""What all indices of generated tokens in a graph have in common, whether they choose keys or draw
them."""

import numpy as np
import pytest

from effinfer.techniques import XAttention
from tests.compiler.generated_rows import (
    CHOOSING,
    DRAWING,
    PROMPT,
    TOKENS,
    generated,
    prompt_and_next,
)
from tests.compiler.tiny_models import Stepper, make_llama, sparse, with_attribute

each_method = pytest.mark.parametrize(
    "method", [*CHOOSING, DRAWING], ids=lambda method: method.name
)


@each_method
def test_rows_choose_alike_however_many_share_a_step(isa, method):
    model = sparse(make_llama(), method)
    expected = generated(model)
    for rows in (2, 3, 10):
        np.testing.assert_array_equal(generated(model, rows), expected)


@each_method
def test_passes_and_threads_change_no_bits(method):
    model = sparse(make_llama(q="q4_0", k="q8_0", v="q8_0"), method)
    expected = generated(model)
    names = ["fuse_rope_append", "fuse_regions", "fuse_attention"]
    for disabled in ([], *([name] for name in names), names):
        actual = generated(model, disabled_passes=set(disabled), threads=3)
        np.testing.assert_array_equal(actual, expected)


@each_method
def test_what_is_chosen_depends_on_its_own_sequence(method):
    model = sparse(make_llama(), method)
    expected = generated(model)
    both = Stepper(model.compile(max_tokens=512, max_rows=512), 2)
    both.step({0: TOKENS[:PROMPT], 1: TOKENS[30:]}, "prefill")
    for i, token in enumerate(TOKENS[PROMPT:]):
        actual = both.step({1: [i], 0: [token]}, "decode")[1]
        np.testing.assert_array_equal(actual, expected[i : i + 1])


@each_method
def test_a_dense_sequence_has_the_bits_of_a_graph_without_an_index(method):
    model = make_llama()
    dense, chosen = generated(model), sparse(model, method)
    np.testing.assert_array_equal(generated(chosen, dense=[1]), dense)
    assert (generated(chosen) != dense).any()


@each_method
def test_prompts_and_generated_rows_have_lists_of_their_own(method):
    prompts = sparse(make_llama(), XAttention(min_tokens=0, threshold=0.3, stride=4))
    both, alone = prompt_and_next(sparse(prompts, method)), prompt_and_next(prompts)
    np.testing.assert_array_equal(both[0], alone[0])
    assert (both[1] != alone[1]).any()


@each_method
def test_an_index_is_for_its_heads_and_others_visit_all(method):
    model = make_llama()

    def logits(only: str) -> np.ndarray:
        return generated(with_attribute(sparse(model, method), "only", only))

    expected = logits("[]")
    np.testing.assert_array_equal(logits("[0, 1]"), expected)
    assert (logits("[0]") != expected).any()
    assert (logits("[0]") != generated(model)).any()

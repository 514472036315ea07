"""copy_index in a graph: layers that visit what an earlier one has chosen."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from effinfer import _core
from effinfer.techniques import Quest, TokenSelect, XAttention
from effinfer.techniques.sparse_decode import SparseDecode
from tests.compiler.generated_rows import STEPS, TOKENS, generated
from tests.compiler.tiny_models import LAYERS, Stepper, TinyModel, make_llama, sparse


@dataclass(frozen=True)
class OfLayers(SparseDecode):
    """Of the 64 keys that are chosen from, all or none, by layer."""

    keys: tuple[int, ...] = ()

    def index(self, layer: int, kv_heads: int) -> tuple[str, dict[str, Any]]:
        return "page_index", {"unit": 16, "keys": self.keys[layer]}


def of_layers(*keys: int, reuse_layers: int = 1) -> OfLayers:
    return OfLayers(min_tokens=0, skip_layers=0, keys=keys, reuse_layers=reuse_layers)


@pytest.mark.parametrize("keys", [0, 64])
def test_a_layer_visits_what_the_one_before_it_has_chosen(isa, keys):
    """The second layer's own index would choose the opposite."""
    model = make_llama()
    copied = generated(sparse(model, of_layers(keys, 64 - keys, reuse_layers=2)))
    np.testing.assert_array_equal(copied, generated(sparse(model, of_layers(keys, keys))))
    assert (copied != generated(sparse(model, of_layers(keys, 64 - keys)))).any()


@pytest.mark.parametrize("rows", [2, 10])
def test_rows_share_steps(rows):
    model = sparse(make_llama(), TokenSelect(202, min_tokens=0, skip_layers=0, reuse_layers=2))
    np.testing.assert_array_equal(generated(model, rows), generated(model))


def test_prompts_keep_an_index_of_their_own():
    alone = sparse(make_llama(), XAttention(min_tokens=0, threshold=0.3, stride=4))
    both = sparse(alone, of_layers(0, 64, reuse_layers=2))

    def logits(of: TinyModel) -> tuple[np.ndarray, np.ndarray]:
        stepper = Stepper(of.compile(**STEPS))
        prompt = stepper.step({0: TOKENS[:240]}, "prefill")[0]
        return prompt, stepper.step({0: TOKENS[240:]}, "decode")[0]

    got, prompts = logits(both), logits(alone)
    np.testing.assert_array_equal(got[0], prompts[0])
    for keys, equal in ((0, True), (64, False)):
        own = logits(sparse(alone, of_layers(0, keys)))[1]
        assert np.array_equal(got[1], own) == equal


def text_of(reuse_layers: int = 2) -> str:
    return Quest(skip_layers=0, reuse_layers=reuse_layers).graph(make_llama().graph).to_string()


def compiled(text: str) -> Any:
    model = make_llama()
    return TinyModel(_core.Graph.parse(text), model.source, model.exact).compile()


def test_its_text_is_read_again():
    text = text_of()
    assert text.count("= page_index(") == 1
    assert text.count("= copy_index(") == LAYERS - 1
    assert _core.Graph.parse(text).to_string() == text
    compiled(text)


@pytest.mark.parametrize(("name", "value"), [("layer", "0"), ("kv_heads", "1"), ("heads", "3")])
def test_lists_of_no_earlier_layer_or_of_other_heads_are_refused(name, value):
    text = text_of()
    copy = next(line for line in text.splitlines() if "= copy_index(" in line)
    wrong = re.sub(rf"\b{name} = \d", f"{name} = {value}", copy)
    assert wrong != copy
    with pytest.raises(_core.FormatError, match=r"\[copy_index\] (from|heads): expected"):
        _core.Graph.parse(text.replace(copy, wrong)).verify()


def test_lists_that_another_layer_replaced_are_refused():
    text = text_of()
    own = [line for line in text_of(1).splitlines() if "= page_index(" in line]
    copy = next(line for line in text.splitlines() if "= copy_index(" in line)
    names = re.compile(r"%([\w.]+)")
    more = own[1].replace(names.findall(own[1])[0], "more", 1)
    with pytest.raises(_core.UnsupportedError, match="which a later layer's replaced"):
        compiled(text.replace(copy, f"{more}\n{copy}"))


def test_lists_of_other_kinds_are_refused():
    """Prompts have lists in the first layer alone."""
    graph = XAttention(min_tokens=0).graph(make_llama().graph)
    text = Quest(skip_layers=0, reuse_layers=2).graph(graph).to_string()
    copy = re.search(r"copy_index\((%[\w.]+), (%[\w.]+)\)", text)
    assert copy is not None
    index = re.search(rf"\n *{copy[2]} : visits\[1, 2\] = .*", text)
    assert index is not None
    text = text.replace(index[0], "").replace(copy[0], f"copy_index({copy[1]})")
    with pytest.raises(_core.UnsupportedError, match=r"kinds .* that layer 1 has"):
        compiled(text)

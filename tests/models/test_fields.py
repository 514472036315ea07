"""What a model's description may hold, and what is refused."""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from effinfer import _core
from effinfer.checkpoints.model_files import open_model
from effinfer.files.fields import Fields
from tests.models.test_config import gguf_config
from tests.reference import tiny

JUNK: list[Any] = [
    "x", "", "1e400", -1, 0, 2**31, 2**40, 1e30, 3.7, -3.5, float("nan"), float("inf"), True,
    [], [1], [[]], ["a"], {}, {"a": 1}, {"rope_type": "yarn", "factor": -2.0},
    {"rope_type": "yarn", "original_max_position_embeddings": 0}, {"type": []},
    {"rope_type": "llama3", "factor": 0}, {"rope_type": "linear", "factor": "x"},
    {"full_attention": {"rope_theta": "x"}}, {"full_attention": 3},
    {"quant_method": "bitnet", "modules_to_not_convert": 5}, {"quant_method": ["bitnet"]},
]  # fmt: skip
OPTIONAL = (
    "architectures", "attn_logit_softcapping", "final_logit_softcapping", "head_dim", "hidden_act",
    "layer_types", "max_window_layers", "partial_rotary_factor", "quantization_config",
    "query_pre_attn_scalar", "rope_local_base_freq", "rope_parameters", "rope_scaling",
    "rope_theta", "sliding_window", "sliding_window_pattern", "text_config", "use_sliding_window",
)  # fmt: skip


def of(**values: Any) -> Fields:
    return Fields.of(values, "config.json", "a.")


def test_values():
    fields = of(n=3, x=2.5, big=np.uint32(7), whole=4.0, s="t", flag=False, list=["a"], none=None)
    assert fields.integer("n") == 3
    assert fields.integer("big") == 7
    assert fields.integer("whole") == 4
    assert fields.number("x") == 2.5
    assert fields.text("s") == "t"
    assert fields.flag("flag", True) is False
    assert fields.texts("list") == ["a"]
    assert fields.integer("none", 9) == fields.integer("absent", 9) == 9
    assert fields.texts("absent") == [] and fields.section("absent") == {}
    assert "n" in fields and "none" not in fields


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda: of().integer("n"), r"a\.n: missing from config\.json"),
        (lambda: of(n="3").integer("n"), r"a\.n: expected a number, got '3'"),
        (lambda: of(n=True).integer("n"), "expected a number, got True"),
        (lambda: of(n=2.5).integer("n"), r"an integer in \[1, 2147483647\], got 2.5"),
        (lambda: of(n=0).integer("n"), "an integer in"),
        (lambda: of(n=9).integer("n", high=8), r"an integer in \[1, 8\]"),
        (lambda: of(n=10**400).number("n"), "a finite number"),
        (lambda: of(n=float("nan")).number("n"), "a finite number"),
        (lambda: of(n=-1).number("n"), "a number of 0 or more"),
        (lambda: of(n=2).number("n", high=1), r"a number in \[0, 1\]"),
        (lambda: of(n=0).number("n", positive=True), "a positive number"),
        (lambda: of(n=1).flag("n"), "true or false"),
        (lambda: of(n=1).text("n"), "a string"),
        (lambda: of(n="ab").texts("n"), "a list of strings"),
        (lambda: of(n=[1]).texts("n"), "a list of strings"),
        (lambda: of(n=[1]).section("n"), r"an object, got \[1\]"),
        (lambda: of(n="x" * 999).integer("n"), r"got 'x+\.\.\.$"),
    ],
)
def test_refused(read, message):
    with pytest.raises(_core.FormatError, match=message):
        read()


class Outcomes:
    """How often something was read, and how often refused: both must happen."""

    read = refused = 0

    def try_to(self, read: Callable[[], object], what: object) -> None:
        try:
            read()
            self.read += 1
        except _core.Error as error:
            assert not isinstance(error, _core.InternalError), what
            self.refused += 1


@pytest.mark.parametrize("name", ["gemma3", "mistral", "qwen2"])
def test_a_folder_that_says_anything(name, tmp_path):
    """Any value at any key: a graph, or a typed error."""
    folder = tiny.write_folder(tiny.FAMILIES[name], tmp_path)
    good = json.loads((folder / "config.json").read_text())
    outcomes = Outcomes()
    for key in dict.fromkeys([*good, *OPTIONAL]):
        for value in JUNK:
            (folder / "config.json").write_text(json.dumps({**good, key: value}))
            outcomes.try_to(partial(open_model, folder), (key, value))
    assert outcomes.read > 30 and outcomes.refused > 30


def test_a_file_that_says_anything():
    name = tiny.architecture(tiny.FAMILIES["gemma3"])
    keys = [f"{name}.{key}" for key in tiny.gguf_metadata(tiny.FAMILIES["gemma3"])]
    scaling = ("type", "factor", "original_context_length", "attn_factor")
    keys += [f"{name}.rope.scaling.{key}" for key in scaling]
    outcomes = Outcomes()
    for key in [*keys, f"{name}.attention.sliding_window", "general.architecture"]:
        for value in [*JUNK, np.arange(3), np.array(["a"])]:
            changes = {f"{name}.rope.scaling.factor": 2.0, key: value}
            config = partial(gguf_config, tiny.FAMILIES["gemma3"], **changes)
            outcomes.try_to(config, (key, value))
    assert outcomes.read > 30 and outcomes.refused > 30

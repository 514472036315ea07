"""Options of executables and engines: one table makes both from keyword arguments."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import effinfer
from effinfer import _core
from tests.compiler.tiny_models import make_llama

SHARED = (
    "precision",
    "deterministic",
    "kv_dtype",
    "max_seq_len",
    "max_sequences",
    "disabled_passes",
    "pack_cache",
    "ternary_packing",
    "device",
)


def make_engine(**options: Any) -> _core.Engine:
    model = make_llama()
    options = {"num_pages": 4, **options}
    return _core.Engine(model.graph, model.source, _core.ThreadPool(1), **options)


MAKERS = {"CompileOptions": _core.CompileOptions, "Engine": make_engine}


def keywords(owner: str) -> list[str]:
    """Of the constructor, as its signature has them."""
    signature = (getattr(_core, owner).__init__.__doc__ or "").splitlines()[0]
    return re.findall(r"(\w+): ", signature.split("*, ")[1])


@pytest.mark.parametrize("owner", MAKERS)
@pytest.mark.parametrize("name", ["precison", "max_token"])
def test_an_unknown_option_is_named(owner, name):
    with pytest.raises(_core.InvalidArgumentError, match=f"{name}: unknown option.*precision"):
        MAKERS[owner](**{name: 1})


@pytest.mark.parametrize("owner", MAKERS)
@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"precision": "f16"}, _core.InvalidArgumentError, 'precision: expected "fast" or "f32"'),
        ({"kv_dtype": "q9"}, _core.InvalidArgumentError, "q9"),
        ({"ternary_packing": "t3"}, _core.InvalidArgumentError, "ternary_packing"),
        ({"device": "cuda:0"}, _core.InvalidArgumentError, 'device: expected "cpu", got "cuda:0"'),
        ({"device": None}, TypeError, "device: expected str"),
        ({"max_sequences": "8"}, TypeError, "max_sequences: expected int, got '8'"),
        ({"max_sequences": None}, TypeError, "max_sequences: expected int, got None"),
        ({"max_seq_len": 1.5}, TypeError, "max_seq_len: expected int"),
        ({"disabled_passes": 3}, TypeError, "disabled_passes"),
        ({"pack_cache": 3}, TypeError, "str, bytes or os.PathLike"),
    ],
)
def test_wrong_values_are_refused(owner, option, error, message):
    with pytest.raises(error, match=message):
        MAKERS[owner](**option)


@pytest.mark.parametrize("owner", MAKERS)
def test_none_leaves_an_option_open(owner):
    MAKERS[owner](kv_dtype=None, max_seq_len=None, pack_cache=None)


def test_an_option_of_both_reaches_the_engine():
    engine = make_engine(
        device="cpu",
        precision="f32",
        kv_dtype="f16",
        max_seq_len=100,
        disabled_passes={"fuse_norm"},
    )
    assert engine.kv_dtype == "f16"
    assert engine.max_seq_len == 100
    report = engine.explain()
    assert "precision f32" in report
    assert "\ndevice cpu\n" in report
    assert re.search(r"fuse_norm\s+off", report)


@pytest.mark.parametrize("owner", MAKERS)
def test_signature_and_types_name_the_options(owner):
    names = keywords(owner)
    assert set(SHARED) < set(names)
    stub = ast.parse((Path(effinfer.__file__).parent / "_core.pyi").read_text())
    (declared,) = (node for node in stub.body if getattr(node, "name", "") == owner)
    assert isinstance(declared, ast.ClassDef)
    init = next(node for node in declared.body if getattr(node, "name", "") == "__init__")
    assert isinstance(init, ast.FunctionDef)
    assert [argument.arg for argument in init.args.kwonlyargs] == names, "run `make stubs`"

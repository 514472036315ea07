"""tools/check_layers.py finds what it is for, and nothing in the repository."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "check_layers.py"


@pytest.fixture(scope="module")
def layers() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_layers", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_repository_is_in_order(layers):
    assert layers.check(layers.ROOT, layers.ALLOWED) == []


def test_what_is_in_order_passes(layers, tmp_path):
    write(
        tmp_path,
        {
            "core/env.h": '#include <string>\n#include "effinfer/error.h"\n',
            "runtime/engine.cpp": '#include "core/env.h"\n#include "runtime/request.h"\n',
            "include/effinfer/engine.h": (
                '#include "effinfer/error.h"\nnamespace effinfer {\n'
                "struct Options;\nstruct Options : Base {\n};\n"
                "class Engine {\n  struct Impl;\n};\n}\n"
            ),
        },
    )
    assert layers.check(tmp_path, {}) == []


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("ops/norm.cpp", '\n#include "cpu/isa.h"\n', 'ops/norm.cpp:2: ops/ includes "cpu/isa.h"'),
        ("compiler/passes/fuse.cpp", '#include "runtime/x.h"\n', "runtime/ is above it"),
        ("io/gguf.cpp", '#include "gguf_impl.h"\n', "is in no layer"),
        ("kernels/norm.h", "", "csrc/kernels/ is no layer"),
        ("include/effinfer/a.h", '#include "core/env.h"\n', "which is not installed"),
        (
            "include/effinfer/a.h",
            "namespace effinfer::cpu {\n",
            "opens the namespace effinfer::cpu",
        ),
        ("include/effinfer/a.h", "namespace ops {\nstruct KvLayer;\n}\n", "a.h:2: a public header"),
    ],
)
def test_what_is_not_is_named(layers, tmp_path, file, text, message):
    write(tmp_path, {file: text})
    (found,) = layers.check(tmp_path, {})
    assert message in found
    assert found.startswith(f"csrc/{file}:")


def test_an_exception_holds_for_what_it_names_and_no_longer(layers, tmp_path):
    write(tmp_path, {"ops/norm.cpp": '#include "cpu/isa.h"\n#include "cpu/team.h"\n'})
    (found,) = layers.check(tmp_path, {("csrc/ops/norm.cpp", "cpu/isa.h"): "because"})
    assert "cpu/team.h" in found
    write(tmp_path, {"ops/norm.cpp": ""})
    (found,) = layers.check(tmp_path, {("csrc/ops/norm.cpp", "cpu/isa.h"): "because"})
    assert "nothing needs the exception" in found

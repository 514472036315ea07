"""The committed types of the native module name everything that the module has."""

import ast
from pathlib import Path

import effinfer
from effinfer import _core

STUB = Path(effinfer.__file__).parent / "_core.pyi"


def names(body: list[ast.stmt]) -> set[str]:
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def public(members: object) -> set[str]:
    return {name for name in vars(members) if not name.startswith("_")}


def test_the_stub_is_complete():
    tree = ast.parse(STUB.read_text())
    missing = public(_core) - names(tree.body)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and hasattr(_core, node.name):
            lacks = public(getattr(_core, node.name)) - names(node.body)
            missing |= {f"{node.name}.{name}" for name in lacks}
    assert not missing, f"run `make stubs`: {sorted(missing)} are not in {STUB.name}"

"""What a pybind11 module has and what its typing stub says, in one form that can be compared.

A description maps the qualified name of a function, class, property or constant to a line of text:
for a function its parameters (names, order, kinds, types, defaults) and what it returns.
"""

from __future__ import annotations

import ast
import re
from types import ModuleType

Description = dict[str, str]

# pybind11's and the stub's words for the same types. An object of no named type is Any, and a
# container of anything has no parameters.
SAME_TYPES = [
    (r"\b(?:effinfer\._core|collections\.abc|numpy\.typing|numpy|typing)\.", ""),
    (r"SupportsInt \| SupportsIndex", "int"),
    (r"SupportsFloat \| SupportsIndex", "float"),
    (r"^ClassVar\[(.*)\]$", r"\1"),
    (r"\bobject\b", "Any"),
    (r"\bNDArray\[Any\]", "ndarray"),
    (r"\bdict\[str, Any\]", "dict"),
    (r"\bdtype\[Any\]", "dtype"),
    (r"\blist\[Any\]", "list"),
    (r"\btuple\[Any, \.\.\.\]", "tuple"),
]
NO_LITERAL = "..."


def differences(stub: Description, module: Description) -> list[str]:
    """Both ways: what one lacks, and what the two say differently."""
    found = []
    for name in sorted(stub.keys() | module.keys()):
        if name not in module:
            found.append(f"{name}: not in the module")
        elif name not in stub:
            found.append(f"{name}: not in the stub")
        elif stub[name] != module[name]:
            found.append(f"{name}: the stub has {stub[name]}, the module {module[name]}")
    return found


def describe_stub(text: str) -> Description:
    return _describe_body(ast.parse(text).body, "")


def describe_module(module: ModuleType) -> Description:
    members = {name: value for name, value in vars(module).items() if not _is_dunder(name)}
    return _describe_members(module, members, "")


# --- the stub -----------------------------------------------------------------------------------


def _describe_body(body: list[ast.stmt], prefix: str) -> Description:
    found: Description = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            name = prefix + node.name
            found[name] = _class_line([ast.unparse(base) for base in node.bases])
            found |= _describe_body(node.body, name + ".")
        elif isinstance(node, ast.FunctionDef):
            _describe_stub_function(node, prefix + node.name, found)
        elif isinstance(node, ast.AnnAssign):
            kind = _type(node.annotation)
            name = prefix + ast.unparse(node.target)
            if node.value is None:
                found[name] = _property_line(kind, kind)
            else:
                found[name] = f"{kind} = {_default(node.value)}"
        elif not isinstance(node, ast.Import | ast.ImportFrom | ast.Expr | ast.Pass):
            raise ValueError(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def _describe_stub_function(node: ast.FunctionDef, name: str, found: Description) -> None:
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    if marks == ["property"]:
        found[name] = _property_line(_type(node.returns))
    elif marks == [f"{node.name}.setter"]:
        found[name] = _property_line(found[name], _type(node.args.args[-1].annotation))
    elif marks in ([], ["staticmethod"]):
        if name in found:
            raise ValueError(f"{name}: described twice")
        found[name] = "static " * len(marks) + _function_line(node)
    else:
        raise ValueError(f"{name}: {marks}")


# --- the module ---------------------------------------------------------------------------------


def _describe_members(owner: object, members: dict[str, object], prefix: str) -> Description:
    found: Description = {}
    for name, value in members.items():
        where = prefix + name
        if isinstance(value, type):
            bases = [base.__name__ for base in value.__bases__ if base is not object]
            found[where] = _class_line([base for base in bases if base != "pybind11_object"])
            own = {n: v for n, v in vars(value).items() if _is_bound(n, v)}
            found |= _describe_members(value, own, where + ".")
        elif type(value) is property:
            getter = _type(_parse_first_line(value.fget, name).returns)
            if value.fset is None:
                found[where] = _property_line(getter)
            else:
                setter = _parse_first_line(value.fset, name).args
                accepted = (setter.posonlyargs + setter.args)[-1].annotation
                found[where] = _property_line(getter, _type(accepted))
        elif isinstance(value, staticmethod):
            found[where] = "static " + _function_line(_parse_first_line(value.__func__, name))
        elif callable(value):
            found[where] = _function_line(_parse_first_line(value, name))
        else:
            constant = getattr(owner, name)
            found[where] = f"{type(constant).__name__} = {constant!r}"
    return found


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_bound(name: str, value: object) -> bool:
    """Whether the bindings define it: Python adds some names to every class, pybind11 one. A class
    without constructor has the slot of its base, and one with __eq__ alone has no hash."""
    # Whoever asks a class for its annotations leaves an empty dict there.
    of_python = {"__module__", "__doc__", "__dict__", "__weakref__", "__annotations__"}
    if name in of_python or name == "_pybind11_conduit_v1_":
        return False
    return value is not None and type(value).__name__ != "wrapper_descriptor"


def _parse_first_line(function: object, name: str) -> ast.FunctionDef:
    """The signature that pybind11 writes into the first line of a docstring."""
    line = (function.__doc__ or "").partition("\n")[0]
    match = re.fullmatch(r"\w*(\(.*\) -> .*)", line)
    if match is None or match[1].startswith("(*args, **kwargs)"):
        raise ValueError(f"{name}: no signature in {line!r}")
    # Objects whose form is no Python, as in `options: CompileOptions = <CompileOptions at 0x1>`.
    signature = re.sub(r"<[^<>]*>", NO_LITERAL, match[1])
    (node,) = ast.parse(f"def {name}{signature}: ...").body
    assert isinstance(node, ast.FunctionDef)
    return node


# --- both ---------------------------------------------------------------------------------------


def _class_line(bases: list[str]) -> str:
    return f"class({', '.join(bases)})"


def _property_line(getter: str, setter: str | None = None) -> str:
    return f"{getter}, set from {setter}" if setter is not None else getter


def _function_line(node: ast.FunctionDef) -> str:
    # Parameters without a name are arg0, arg1, ...; only pybind11 says that they are positional.
    positional = node.args.posonlyargs + node.args.args
    defaults = [None] * (len(positional) - len(node.args.defaults)) + node.args.defaults
    parts = [_parameter(*pair) for pair in zip(positional, defaults, strict=True)]
    if node.args.vararg is not None:
        parts.append("*" + _parameter(node.args.vararg, None))
    elif node.args.kwonlyargs:
        parts.append("*")
    named = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    parts += [_parameter(*pair) for pair in named]
    if node.args.kwarg is not None:
        parts.append("**" + _parameter(node.args.kwarg, None))
    return f"({', '.join(parts)}) -> {_type(node.returns)}"


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    if argument.arg == "self":
        return "self"
    kind = _type(argument.annotation)
    if default is None:
        return f"{argument.arg}: {kind}"
    # pybind11 leaves it open whether what is None by default is optional.
    value = _default(default)
    kind = kind.removesuffix(" | None") if value == "None" else kind
    return f"{argument.arg}: {kind} = {value}"


def _default(value: ast.expr) -> str:
    try:
        literal = ast.literal_eval(value)
    except ValueError:
        return NO_LITERAL
    return NO_LITERAL if literal is ... else repr(literal)


def _type(annotation: ast.expr | None) -> str:
    if annotation is None:
        return "Any"
    text = ast.unparse(annotation)
    for pattern, replacement in SAME_TYPES:
        text = re.sub(pattern, replacement, text)
    return text

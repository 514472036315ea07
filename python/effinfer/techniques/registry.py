"""All techniques of the package, by name."""

from dataclasses import MISSING, fields
from typing import Any

from effinfer import _core
from effinfer.techniques.drafting_methods import drafting_methods
from effinfer.techniques.hyper_attention import HyperAttention
from effinfer.techniques.kv_methods import KV_METHODS
from effinfer.techniques.minference import MInference
from effinfer.techniques.s2_attention import S2Attention
from effinfer.techniques.sample_attention import SampleAttention
from effinfer.techniques.technique import Meta, Technique, name_of
from effinfer.techniques.xattention import XAttention

_CLASSES: tuple[type[Any], ...] = (
    HyperAttention,
    MInference,
    S2Attention,
    SampleAttention,
    XAttention,
    *KV_METHODS,
)

# Classes with META, in alphabetical order of their names.
REGISTRY: dict[str, type[Any]] = dict(
    sorted({**{name_of(each): each for each in _CLASSES}, **drafting_methods()}.items())
)


def meta_of(name: str) -> Meta:
    """Throws InvalidArgumentError for an unknown name."""
    meta: Meta = _class_named(name).META
    return meta


def technique_named(name: str) -> Technique:
    """One with its defaults. Throws InvalidArgumentError for an unknown name, and for one that
    `LLM(techniques=...)` does not take."""
    kind = _class_named(name)
    if not issubclass(kind, Technique):
        raise _core.InvalidArgumentError(
            f"[LLM] techniques: {kind.META.family} is what `speculation`, `draft_model` or "
            f"`layers` take, got {name!r}"
        )
    made: Technique = kind()
    return made


def _class_named(name: str) -> type[Any]:
    if name in REGISTRY:
        return REGISTRY[name]
    known = ", ".join(REGISTRY)
    raise _core.InvalidArgumentError(f"[LLM] techniques: expected one of {known}, got {name!r}")


def defaults_of(kind: type[Any]) -> dict[str, str]:
    """What its fields are when nobody says; "" where somebody has to."""
    found = {}
    for field in fields(kind):
        made = field.default_factory() if field.default_factory is not MISSING else field.default
        found[field.name] = "" if made is MISSING else repr(made)
    return found

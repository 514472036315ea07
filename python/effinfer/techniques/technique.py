"""What every technique is: a frozen dataclass that says what it does (`META`), refuses wrong values
of its fields by name, and changes a model's graph, its engine, or a request.

    @dataclass(frozen=True)
    class Streaming(Technique):
        META: ClassVar[Meta] = Meta(paper="...", arxiv="2309.17453", family="prefill.sparse", ...)
        local_tokens: int = integer(512, least=1)

        def graph(self, graph): ...
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from effinfer import _core
from effinfer.techniques.ranges import Range

if TYPE_CHECKING:
    from effinfer.techniques.setup import EngineSetup, RequestSetup

EFFECTS = ("lossless", "approximate", "trained")
# What only one technique of a model may decide. A technique names others as it likes.
RESOURCES = {
    "prefill.visits": "which keys rows of a prompt visit",
    "decode.visits": "which keys generated tokens visit",
    "kv.resident": "which keys stay in the cache",
    "kv.format": "how keys and values are stored",
    "model.layers": "which layers run",
    "speculation.verifier": "which drafts are accepted",
}


@dataclass(frozen=True, kw_only=True)
class Meta:
    """
    Args:
        paper: title, and arxiv: its number, "" where it has none.
        family: "prefill.sparse", "kv.eviction": what it is a kind of, and its kind of that.
        primitives: of the engine, that it is made of.
        effect: "lossless" (the text of the model, or of its distribution), "approximate", or
            "trained": approximate, for models that were trained for it.
        needs: of a model: "attention", "vocabulary" (of a second model) or what else.
        exclusive: resources (`RESOURCES`) that it decides alone.
        dense_limit: fields with which it gives the bits of plain decoding; None: there are none.
        probe: the quick case that shows it on a real model.
        differs: from the paper.
        python_steps: whether its hooks are written in Python.
        name: by which lists name it; "": the class's, in snake case.
    """

    paper: str
    arxiv: str
    family: str
    primitives: tuple[str, ...]
    effect: str
    needs: tuple[str, ...] = ()
    exclusive: tuple[str, ...] = ()
    dense_limit: Mapping[str, Any] | None = None
    probe: str = ""
    differs: str = ""
    python_steps: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        wrong = {
            "paper": not self.paper,
            "arxiv": not re.fullmatch(r"(\d{4}\.\d{4,5})?", self.arxiv),
            "family": not re.fullmatch(r"[a-z_]+\.[a-z_]+", self.family),
            "primitives": not _are_texts(self.primitives),
            "effect": self.effect not in EFFECTS,
            "needs": not _are_texts(self.needs),
            "exclusive": not _are_texts(self.exclusive),
            "name": not re.fullmatch(r"[a-z0-9_]*", self.name),
        }
        for field_name, is_wrong in wrong.items():
            if is_wrong:
                got = getattr(self, field_name)
                raise _core.InvalidArgumentError(
                    f"[Meta] {field_name}: not as it shall be: {got!r}"
                )


def _are_texts(values: object) -> bool:
    return isinstance(values, tuple) and all(isinstance(v, str) and v for v in values)


def name_of(technique: Any) -> str:
    """Of an object or a class with META: "minference"."""
    kind = technique if isinstance(technique, type) else type(technique)
    own = kind.__dict__.get("META")
    if own is not None and own.name:
        return str(own.name)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", kind.__name__).lower()


@dataclass(frozen=True)
class Technique:
    """Subclasses are frozen dataclasses; one object serves many models. Each of the methods is
    optional."""

    META: ClassVar[Meta]

    def __post_init__(self) -> None:
        """Throws InvalidArgumentError naming the field that is out of its range."""
        for field in fields(self):
            limits = field.metadata.get("range")
            if isinstance(limits, Range):
                limits.check(type(self).__name__, field.name, getattr(self, field.name))

    @property
    def name(self) -> str:
        return name_of(self)

    def graph(self, graph: _core.Graph) -> _core.Graph:
        """The model's graph with the technique in it."""
        return graph

    def engine(self, setup: EngineSetup) -> None:
        """Adds hooks and parts of speculation to an engine that is about to be made."""

    def request(self, setup: RequestSetup) -> None:
        """Changes the parameters of a request that runs with the technique."""

    def facts(self) -> dict[str, Any]:
        """What the engine has to know, beside `META.exclusive`: chooses: "prompt", "output" or
        "both", whose rows visit chosen keys; min_tokens: prompts with fewer stay as they are;
        chunk_tokens: where steps of a prompt end, where what is kept or visited depends on it;
        kv_bits, kv_residual: in how many bits pages behind so many newest tokens are kept;
        kv_rank, kv_outliers: with how much of what these lack; kv_features, kv_basis: of features
        in which basis, which kv_shared_layers have in common; kv_codebooks: as numbers of vectors
        in these; layer_groups: so many neighbouring layers without a window have a page table of
        their own, so that a hook may keep another number of keys in each; key_chunks: the chunks
        of keys that the graph's nodes know are of its requests alone."""
        return {}

    def to_json(self) -> str:
        """Name and fields, for from_json() of techniques."""
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        facts = {"technique": self.name, **_plain(own)}
        return json.dumps(facts, sort_keys=True, default=repr)

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> Technique:
        """Of the fields of to_json(). Throws InvalidArgumentError for others."""
        known = {field.name: field for field in fields(cls)}
        for key in values:
            if key not in known:
                raise _core.InvalidArgumentError(
                    f"[{cls.__name__}] {key}: expected one of {', '.join(known)}"
                )
        return cls(**{key: _restored(known[key], value) for key, value in values.items()})


def _plain(value: Any) -> Any:
    """As JSON has it: a mapping whose keys are no texts is a list of pairs."""
    if isinstance(value, Mapping) and not all(isinstance(key, str) for key in value):
        return [[_plain(key), _plain(each)] for key, each in value.items()]
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    # Bases and codebooks are hundreds of thousands of numbers, which JSON has as they are.
    if isinstance(value, list | tuple) and not all(isinstance(each, int) for each in value):
        return [_plain(each) for each in value]
    return value


def _restored(field: Field[Any], value: Any) -> Any:
    default = field.default_factory() if field.default_factory is not MISSING else field.default
    if isinstance(default, Mapping) and isinstance(value, list):
        return {tuple(key) if isinstance(key, list) else key: each for key, each in value}
    if isinstance(default, tuple) and isinstance(value, list):
        return tuple(value)
    return value

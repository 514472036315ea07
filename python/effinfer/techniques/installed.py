"""The techniques of one model: no two that want the same; in its graph, engine and requests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from effinfer import _core
from effinfer.techniques.prefill import SparsePrefill
from effinfer.techniques.registry import REGISTRY, technique_named
from effinfer.techniques.rewrite import with_metadata
from effinfer.techniques.setup import EngineSetup, RequestSetup, hooks_of
from effinfer.techniques.technique import Technique

if TYPE_CHECKING:
    from effinfer.sampling import SamplingParams
    from effinfer.speculation import Speculation

PREFILLS: dict[str, type[SparsePrefill]] = {
    name: each for name, each in REGISTRY.items() if issubclass(each, SparsePrefill)
}


def as_techniques(given: object) -> list[Technique]:
    """Objects, and names for their defaults, also several as "a,b": a list of them, or one alone;
    None for none. Throws InvalidArgumentError."""
    if given is None:
        return []
    if isinstance(given, str | Technique):
        given = [given]
    if not isinstance(given, Iterable) or isinstance(given, Mapping | bytes):
        raise _wrong(given)
    found = []
    for each in _with_names_apart(given):
        technique = technique_named(each) if isinstance(each, str) else each
        meta = getattr(technique, "META", None)
        if (
            not isinstance(technique, type)
            and meta is not None
            and not isinstance(technique, Technique)
        ):
            raise _core.InvalidArgumentError(
                f"[LLM] techniques: {meta.family} is what `speculation`, `draft_model` or `layers` "
                f"take, got {technique!r}"
            )
        if not isinstance(technique, Technique):
            raise _wrong(each)
        found.append(technique)
    return found


def _with_names_apart(given: Iterable[object]) -> list[object]:
    apart: list[object] = []
    for each in given:
        apart += [name for name in each.split(",") if name] if isinstance(each, str) else [each]
    return apart


def as_prefill(prefill: object) -> SparsePrefill | None:
    """A method by its name, with its defaults; None for "dense". Throws InvalidArgumentError."""
    if isinstance(prefill, SparsePrefill):
        return prefill
    if prefill == "dense":
        return None
    if not isinstance(prefill, str) or prefill not in PREFILLS:
        known = ", ".join(["dense", *PREFILLS])
        raise _core.InvalidArgumentError(
            f"[LLM] prefill: expected {known} or a SparsePrefill, got {prefill!r}"
        )
    return PREFILLS[prefill]()


def _wrong(got: object) -> _core.Error:
    return _core.InvalidArgumentError(
        f"[LLM] techniques: expected objects of effinfer.techniques or their names, got {got!r}"
    )


def check_conflicts(techniques: Sequence[Technique]) -> None:
    """Throws ConflictError where two of them want to decide the same; a name is one's own."""
    owners: dict[str, list[str]] = {}
    for technique in techniques:
        for resource in (f"the name {technique.name!r}", *technique.META.exclusive):
            owners.setdefault(resource, []).append(technique.name)
    for resource, names in owners.items():
        if len(names) > 1:
            raise _core.ConflictError(
                f"[techniques] {resource}: expected one technique that decides it, got "
                + " and ".join(names)
            )


class Installed:
    """The techniques of an LLM. Throws InvalidArgumentError, ConflictError."""

    def __init__(self, given: object = None, prefill: object = "dense") -> None:
        """prefill: a short form for one of them."""
        sparse = as_prefill(prefill)
        self.techniques = as_techniques(given) + ([] if sparse is None else [sparse])
        check_conflicts(self.techniques)

    def graph(self, graph: _core.Graph) -> _core.Graph:
        """With all techniques, and what the engine has to know of them as metadata. A graph that
        had some keeps them."""
        entries: dict[str, Any] = {}
        # What chooses keys of generated tokens follows what chooses those of prompts.
        for technique in sorted(
            self.techniques, key=lambda each: "decode.visits" in each.META.exclusive
        ):
            before, graph = graph, technique.graph(graph)
            key = f"technique.{technique.name}"
            entries[key] = technique.to_json()
            entries.update({f"{key}.{fact}": v for fact, v in technique.facts().items()})
            own_engine = type(technique).engine is not Technique.engine
            steps = graph is not before or own_engine or any(hooks_of(technique))
            if technique.META.effect == "lossless" or not steps:
                entries[f"{key}.lossless"] = True
            if technique.META.exclusive:
                entries[f"{key}.exclusive"] = ",".join(technique.META.exclusive)
        return with_metadata(graph, entries) if entries else graph

    def setup(self, graph: _core.Graph, speculation: Speculation | None) -> EngineSetup:
        """An engine of this model, with what the techniques add to it."""
        setup = EngineSetup(self.graph(graph), speculation)
        for technique in self.techniques:
            setup.hooks += hooks_of(technique)
            technique.engine(setup)
        return setup

    def request(self, prompt: Sequence[int], params: SamplingParams) -> SamplingParams:
        """What a request runs with. Throws InvalidArgumentError for techniques that the model does
        not have as they are given."""
        if not self.techniques:
            return params
        chosen = self.techniques if params.techniques is None else self._chosen(params)
        setup = RequestSetup(tuple(prompt), params)
        for technique in chosen:
            technique.request(setup)
        return setup.params

    def requests(
        self, requests: Sequence[tuple[Sequence[int], SamplingParams]]
    ) -> list[tuple[Sequence[int], SamplingParams]]:
        return [(prompt, self.request(prompt, params)) for prompt, params in requests]

    def _chosen(self, params: SamplingParams) -> list[Technique]:
        known = {technique.name: technique for technique in self.techniques}
        chosen = []
        given = params.techniques
        each_given = given if isinstance(given, list | tuple) else (given,)
        for each, name in zip(each_given, params.technique_names(), strict=True):
            if name not in known or (not isinstance(each, str) and each != known[name]):
                names = ", ".join(known)
                raise _core.InvalidArgumentError(
                    f"[sampling] techniques: expected those of the model ({names}), got {each!r}"
                )
            chosen.append(known[name])
        return chosen

    def explain(self) -> str:
        """A line a technique; "" where there are none."""
        if not self.techniques:
            return ""
        lines = [f"  {t.META.family} {t.META.effect}: {t!r}" for t in self.techniques]
        return "\n".join(["techniques:", *lines])

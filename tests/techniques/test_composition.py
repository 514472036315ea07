"""A technique of each family with one of each other: both do what they promise, or the model is
refused with what both want to decide."""

from dataclasses import replace
from itertools import combinations_with_replacement
from typing import Any

import pytest

import effinfer
from effinfer import LLM
from effinfer.techniques import Technique
from tests.techniques.contract_cases import CASES, DRAFTERS
from tests.techniques.contract_model import CHUNK, asks, long_model, texts

TECHNIQUES: dict[str, list[Technique]] = {}  # the first two of each family
for case in CASES.values():
    TECHNIQUES.setdefault(case.META.family, []).append(case)


def representative(family: str, place: int) -> Any:
    if family in DRAFTERS:
        return DRAFTERS[family]
    known = TECHNIQUES[family]
    return known[min(place, len(known) - 1)]


FAMILIES = sorted({*TECHNIQUES, *DRAFTERS})


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return long_model(tmp_path_factory)


def load(path: Any, *parts: Any, **options: Any) -> LLM:
    methods = [part for part in parts if isinstance(part, Technique)]
    drafters = [part for part in parts if not isinstance(part, Technique)]
    speculation = effinfer.Speculation(drafters) if drafters else None
    settings = {"threads": 1, "max_batch_tokens": CHUNK, **options}
    return LLM(path, techniques=methods, speculation=speculation, **settings)


@pytest.mark.parametrize(("one", "other"), list(combinations_with_replacement(FAMILIES, 2)))
def test_pairs(path, one, other):
    parts = [representative(one, 0), representative(other, 1)]
    methods = [part for part in parts if isinstance(part, Technique)]
    shared = set.intersection(*(set(part.META.exclusive) for part in parts))
    if shared:
        with pytest.raises(effinfer.ConflictError) as raised:
            load(path, *parts)
        refused = {"the name"} if parts[0] is parts[1] else shared  # a family's only one
        assert any(resource in str(raised.value) for resource in refused)
        return
    # Drafts change no text, so that of the techniques is what there is alone.
    base = load(path, *methods, prefix_cache=False)
    alone = [texts(base, [ask])[0] for ask in asks()]
    together = load(path, *parts)
    assert texts(together, asks()) == alone
    assert texts(together, asks()) == alone  # with what is cached
    plain = texts(load(path), asks())
    off = [(prompt, replace(params, techniques=())) for prompt, params in asks()]
    assert texts(together, off) == plain


def test_a_technique_with_itself_is_refused(path):
    for case in CASES.values():
        with pytest.raises(effinfer.ConflictError, match=case.name):
            load(path, case, case)
